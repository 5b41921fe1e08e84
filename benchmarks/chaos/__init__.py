"""Kills, stops and starves training runs at random and aimed moments, and says whether any promise broke."""
