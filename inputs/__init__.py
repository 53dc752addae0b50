"""From rows to token ids and image tensors, and from a batch to packed forward passes."""
