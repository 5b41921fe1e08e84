"""Checks of a user's own loss: that it is a loss, and still the one that a checkpoint was trained with."""
