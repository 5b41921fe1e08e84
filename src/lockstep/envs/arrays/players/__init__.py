"""Players of array environments that follow a rule."""
