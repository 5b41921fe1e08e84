"""Mirrors a run to a bucket, or any place that fsspec knows, so that hosts without its directory can resume it."""
