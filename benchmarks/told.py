"""The side of a script: what it was told, and how it answers.

Only the standard library is imported here: scripts run with interpreters that have nothing of Quorate's.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any


def read_order() -> dict[str, Any]:
    """What the launcher wants."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    return order


def reading(
    case: str,
    processes: int,
    ms: Iterable[float],
    *,
    size: int | None = None,
    threads: int = 1,
    details: Mapping[str, float] | None = None,
    system: str | None = None,
) -> dict[str, Any]:
    """One case that was measured: milliseconds, one number for each repetition.

    A script that measures several systems says which one it is.
    """
    named = {} if system is None else {"system": system}
    return named | {
        "case": case,
        "processes": processes,
        "ms": [round(one, 6) for one in ms],
        "bytes": size,
        "threads": threads,
        "details": dict(details or {}),
    }


def answer(*readings: Mapping[str, Any]) -> None:
    """The one line that the launcher reads."""
    print(json.dumps({"readings": readings}), flush=True)
