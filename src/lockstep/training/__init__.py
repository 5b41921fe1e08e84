"""The host's half of training, the same for both engines."""
