"""Requests to other machines, and the secrets that they need."""
