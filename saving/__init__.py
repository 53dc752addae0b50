"""Checkpoints: written, read, and a run that goes on from one."""
