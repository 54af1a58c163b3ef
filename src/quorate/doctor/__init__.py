"""What is installed, usable and reachable here, and what to do about the rest."""
