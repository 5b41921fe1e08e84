"""Data parallelism for scripts and libraries that know nothing of it."""
