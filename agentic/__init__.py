"""Agents, programs of others that ask the model by OpenAI's API, and what they asked as trajectories."""
