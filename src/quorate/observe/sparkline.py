"""A curve in one line of text."""

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"
GAP = " "


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Values from left to right, the least as the first of the blocks and the greatest as the last.

    Where there are more values than room, each character stands for the mean of its share. A share without a finite
    number is a gap.
    """
    means = [_mean(share) for share in _shares(values, width)]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return GAP * len(means)
    least, greatest = min(finite), max(finite)
    return "".join(GAP if mean is None else blocks[_level(mean, least, greatest, len(blocks))] for mean in means)


def blocks_for(encoding: str) -> str:
    """The blocks that a stream of this encoding can show."""
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII_BLOCKS
    return BLOCKS


def _shares(values: Sequence[float], width: int) -> list[Sequence[float]]:
    """Contiguous shares of as equal a length as possible, none of them empty."""
    count = max(0, min(width, len(values)))
    return [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]


def _mean(share: Sequence[float]) -> float | None:
    finite = [value for value in share if math.isfinite(value)]
    # Divided first: the sum of large numbers can be infinite where their mean is not.
    return sum(value / len(finite) for value in finite) if finite else None


def _level(value: float, least: float, greatest: float, levels: int) -> int:
    if greatest == least:
        return 0
    # Halved for the same reason: from the least to the greatest number is further than numbers go.
    height = (value / 2 - least / 2) / (greatest / 2 - least / 2)
    return min(levels - 1, int(height * levels))
