"""What every part stands on: errors, shards, places of ranks, spaces, episodes, moments, machines, files."""
