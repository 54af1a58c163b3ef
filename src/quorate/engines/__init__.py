"""Where processes run: on this machine, for now."""
