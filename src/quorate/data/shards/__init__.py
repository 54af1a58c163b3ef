"""Data in shards: files that are read block by block, each block checked against the index of the shards."""
