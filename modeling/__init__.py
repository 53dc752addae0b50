"""Models of transformers: loading, parts, packed forward passes, where weights are."""
