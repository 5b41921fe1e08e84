"""What a run is a function of: its settings, where they come from, and what fits together."""
