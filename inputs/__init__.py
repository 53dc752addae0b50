"""From rows to token ids and image tensors; formats of tool calls; trajectories."""
