"""Folders and files that survive a crash."""
