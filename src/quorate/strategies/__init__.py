"""How the lanes' gradients become one update."""
