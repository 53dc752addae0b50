"""Limits for other people's code and text: time limits, the sandbox."""
