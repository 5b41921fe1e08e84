"""A copy of a run elsewhere: in a bucket, or any place that fsspec knows; hosts without its directory go on from it."""
