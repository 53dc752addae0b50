"""Servers: both ends of a weight push, and how a teacher's are asked."""
