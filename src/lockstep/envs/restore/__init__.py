"""How environments come back after a crash."""
