"""What a run leaves behind: metrics, completions, checkpoints, the report."""
