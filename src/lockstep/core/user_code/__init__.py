"""Code of the user's own: how it is found or handed over, where it runs, and what is said of its errors."""
