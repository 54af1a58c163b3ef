"""Compressed gradients: of each lane only the largest elements are sent, or all in 8 bits."""
