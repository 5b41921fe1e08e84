"""The config that a run is a function of: its settings, their sources, and the checks that they fit together."""
