"""Encrypted checkpoints: the cipher, and the key that it is made from."""
