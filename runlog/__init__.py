"""What a run records: metrics, completions, tokens; and its trackers."""
