"""How a run starts: checks of settings, model and rows; the generator; the first push; turns on a shared GPU."""
