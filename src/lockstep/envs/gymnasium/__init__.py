"""Steps single Gymnasium environments: keyed seeds, wrappers, worker processes."""
