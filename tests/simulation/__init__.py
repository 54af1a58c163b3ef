"""Simulator and fault scripts: used by tests and by `quorate chaos` only."""
