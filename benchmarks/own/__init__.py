"""Quorate's side of the benchmarks."""
