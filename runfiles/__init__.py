"""The files of a run folder: their text, reading them back, and advice on the run."""
