"""Sizes of gradients as people write them: 64KB, 25MB. A kilobyte has 1024 bytes here."""

import re

from quorate.core.errors import RequestError

UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
ELEMENT = 4
"""Bytes of a float32."""

_SIZE = re.compile(r"(\d+)\s*([KMG]?)I?B", re.IGNORECASE)


def parse_size(text: str, option: str = "--sizes") -> int:
    """The bytes that a text such as 64KB means."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise RequestError(f"{option}: {text!r} is not a size. Write a whole number and B, KB, MB or GB, such as 25MB.")
    size = int(found[1]) * UNITS[f"{found[2].upper()}B"]
    if size == 0 or size % ELEMENT:
        raise RequestError(
            f"{option}: {text!r} is {size:,} bytes, which is not a number of float32 values. "
            f"Give a multiple of {ELEMENT} bytes above 0."
        )
    return size


def size_in_words(size: int) -> str:
    """The bytes in the largest unit that leaves a whole number: 25 MB."""
    unit = next(unit for unit in reversed(UNITS) if size % UNITS[unit] == 0)
    return f"{size // UNITS[unit]} {unit}"
