"""Seeds of random streams. Hashed, not added: (seed 1, step 2) and (seed 2, step 1) must not meet."""

import hashlib


def derive_seed(seed: int, *labels: int | str) -> int:
    """A 63-bit seed for the stream that `labels` name, such as ``("lane", step, lane)``."""
    text = "/".join([f"{type(label).__name__}:{label}" for label in (seed, *labels)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
