"""Single Gymnasium environments: keyed seeds, wrappers, worker processes."""
