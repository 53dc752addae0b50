"""Agents: programs of others that call the model by OpenAI's API, whose calls become trajectories."""
