"""The files of a run folder: what may stand in them, how they are read, and what they say of the run."""
