"""Lists on the command line: numbers, sizes and names with commas between them."""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.size import parse_size
from benchmarks.system import System
from quorate.core.errors import RequestError

Item = TypeVar("Item")

_CROWD = re.compile(r"(\d+)(?:x(\d+))?")


@dataclass(frozen=True)
class Crowd:
    """So many processes, each with so many threads."""

    processes: int
    threads: int = 1


def parse_counts(text: str, option: str, least: int = 1) -> list[int]:
    """Whole numbers of at least so many, such as 2,4."""
    return _items(text, option, lambda item: _count(item, option, least))


def parse_sizes(text: str) -> list[int]:
    """Sizes in bytes, such as 1KB,25MB."""
    return _items(text, "--sizes", parse_size)


def parse_crowds(text: str, option: str) -> list[Crowd]:
    """Numbers of processes, where 4x2 is 4 processes of 2 threads each."""
    return _items(text, option, lambda item: _crowd(item, option))


def parse_names(text: str, allowed: Sequence[str], option: str) -> list[str]:
    """Some of the names that there are, in the order in which they are allowed."""
    given = set(_items(text, option, lambda item: _name(item, allowed, option)))
    return [name for name in allowed if name in given]


def choose_systems(text: str | None, systems: Sequence[System]) -> list[System]:
    """Those that are named with `--systems`, or all."""
    names = [system.name for system in systems]
    wanted = names if text is None else parse_names(text, names, "--systems")
    return [system for system in systems if system.name in wanted]


def _items(text: str, option: str, parse: Callable[[str], Item]) -> list[Item]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise RequestError(f"{option}: nothing is given. Write one value, or several with commas between them.")
    return list(dict.fromkeys(parse(word) for word in words))


def _count(text: str, option: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise RequestError(f"{option}: {text!r} is not a whole number {'above 0' if least else 'of 0 or more'}.")
    return int(text)


def _crowd(text: str, option: str) -> Crowd:
    found = _CROWD.fullmatch(text)
    crowd = Crowd(int(found[1]), int(found[2] or 1)) if found else Crowd(0)
    if crowd.processes < 1 or crowd.threads < 1:
        raise RequestError(
            f"{option}: {text!r} is not a number of processes. Write a whole number above 0, or 4x2 for 4 processes "
            "of 2 threads each."
        )
    return crowd


def _name(text: str, allowed: Sequence[str], option: str) -> str:
    if text in allowed:
        return text
    near = difflib.get_close_matches(text, allowed, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise RequestError(f"{option}: {text!r} is not one of {', '.join(allowed)}.{hint}")
