"""How a length is cut into parts."""

from functools import lru_cache
from itertools import pairwise


@lru_cache(maxsize=1024)  # the same few cuts, several times a step
def cut(length: int, parts: int) -> tuple[slice, ...]:
    """Contiguous slices, as even as possible, the larger ones first; where there is too little, the last are empty."""
    if length < 0 or parts < 1:
        raise ValueError(f"a length of {length} cannot be cut into {parts} parts: length >= 0 and parts >= 1 must hold")
    size, larger = divmod(length, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(starts))
