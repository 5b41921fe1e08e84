"""Pictures of array environments."""
