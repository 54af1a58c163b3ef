"""Numbers, lists and text of others as a person reads them; plain ASCII, but for curves: they go into files and
narrow terminals."""

import itertools
import math
import re
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"

_UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def visible(text: str) -> str:
    """What a task has said, without the power to move a cursor or to colour a terminal."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


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


def gibibytes(count_of_bytes: float) -> str:
    """Memory of a device in GiB, as its tools count it; without the unit, so that two share one."""
    return f"{count_of_bytes / 2**30:.1f}"


def device_memory(told: object) -> str:
    """What a result tells of the memory of a GPU; empty where it tells none."""
    kinds = ("allocated_bytes", "reserved_bytes", "total_bytes")
    if not isinstance(told, dict) or not all(isinstance(told.get(kind), int) for kind in kinds):
        return ""
    used, kept, there = (gibibytes(told[kind]) for kind in kinds)
    return f"{used} of {there} GiB on the GPU, {kept} with what PyTorch keeps for later"


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


def age(seconds: float) -> str:
    """A time span to one unit: 3 minutes, 1 day."""
    for length, unit in _UNITS:
        if seconds >= length:
            return plural(int(seconds // length), unit)
    return f"{int(seconds)} s"


def ago(seconds: float) -> str:
    """How long ago something was, to one unit."""
    return f"{age(seconds)} ago" if seconds >= 1 else "just now"


def plural(number: int, noun: str) -> str:
    """So many of them."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def some_of(words: Sequence[str], most: int) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Values from left to right, the least as the first of the blocks and the greatest as the last.

    Where there are more values than room, each character stands for the mean of its share, all of as equal a length as
    possible. A share without a finite number is a gap.
    """
    room = max(0, min(width, len(values)))
    bounds = [index * len(values) // room for index in range(room + 1)] if room else []
    means = [_mean(values[first:last]) for first, last in itertools.pairwise(bounds)]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return " " * len(means)
    # Halved: from the least to the greatest number is further than numbers go.
    least, span = min(finite) / 2, max(finite) / 2 - min(finite) / 2
    heights = [None if mean is None else (mean / 2 - least) / span if span else 0.0 for mean in means]
    top = len(blocks) - 1
    return "".join(" " if height is None else blocks[min(top, int(height * len(blocks)))] for height in heights)


def blocks_for(encoding: str) -> str:
    """The blocks that a stream of this encoding can show."""
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII_BLOCKS
    return BLOCKS


def _mean(share: Sequence[float]) -> float | None:
    finite = [value for value in share if math.isfinite(value)]
    # Divided first: the sum of large numbers can be infinite where their mean is not.
    return sum(value / len(finite) for value in finite) if finite else None
