"""The base of all other layers: errors, shards, topology, spaces, episodes, normalisers, processes, machines, files."""
