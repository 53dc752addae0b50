"""What a run leaves behind: metrics, completions, what trackers get."""
