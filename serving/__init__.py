"""Servers: both ends of a weight push, and the client of a teacher's servers."""
