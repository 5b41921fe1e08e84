"""Losses of the user's own before they are trained: whether one is a loss, and the same as a checkpoint's."""
