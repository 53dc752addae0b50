"""Rewards that need more than a few lines, and the processes they run in."""
