"""How a run starts: its settings against model and rows, its generator, the first push; whose turn a shared GPU is."""
