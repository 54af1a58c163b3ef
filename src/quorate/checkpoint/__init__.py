"""Save, verify, restore and keep a job's state."""
