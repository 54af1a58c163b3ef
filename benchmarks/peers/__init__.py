"""The peers' side of the benchmarks: each in the way that its own documentation shows."""
