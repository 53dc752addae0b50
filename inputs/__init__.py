"""From rows to token ids and image tensors; how calls are written in text; what a trajectory holds."""
