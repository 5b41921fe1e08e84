"""Descriptions of networks that both engines build: shapes, options and initial parameters."""
