"""Numbers as a person reads them. Plain ASCII, but for curves: they also go into files and narrow terminals."""

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"


def count(value: float) -> str:
    """A whole number with separators, such as 12,345; small rates keep a decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measure(value: object) -> str:
    """A loss or metric, to four digits; in files, None stands for what JSON has no number for."""
    if value is None:
        return "not finite"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:#.4g}"


def size(count_of_bytes: float) -> str:
    """Bytes in the largest fitting unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count_of_bytes < 1000:
            return f"{count_of_bytes:.3g} {unit}"
        count_of_bytes /= 1000
    return f"{count_of_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """A time span as 42 s, 3:07 or 2:03:07; short ones with decimals."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def plural(number: int, noun: str) -> str:
    """So many of them."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Values from left to right, the least as the first of the blocks and the greatest as the last.

    Where there are more values than room, each character stands for the mean of its share. A share without a finite
    number is a gap.
    """
    means = [_mean(share) for share in _shares(values, width)]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return " " * len(means)
    least, greatest = min(finite), max(finite)
    return "".join(" " if mean is None else blocks[_level(mean, least, greatest, len(blocks))] for mean in means)


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
