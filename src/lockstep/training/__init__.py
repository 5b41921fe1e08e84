"""The host's half of training, which both engines share."""
