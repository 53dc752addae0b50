"""Bounds for code and text of others: time limits, the sandbox."""
