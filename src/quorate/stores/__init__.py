"""Object stores: a run whose checkpoints lie in one, and copies of checkpoints."""
