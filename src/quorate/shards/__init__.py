"""Datasets of files that need not fit into memory: indexed, verified, read block after block, cached."""
