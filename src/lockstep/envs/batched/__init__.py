"""Steps many environments at once."""
