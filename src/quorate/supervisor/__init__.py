"""Keeps the processes of one job alive, on whatever engine they run."""
