"""Draws configs, and holds each of them to the promise that its run is a function of it alone."""
