"""Chunks: what moves together, where it lies, and when it comes and goes."""
