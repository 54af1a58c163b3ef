"""The one JSON document that a verb prints with `--json`, whatever becomes of the verb."""

import json
import math
import sys
from typing import Any, TextIO
from weakref import WeakSet

_told: WeakSet[TextIO] = WeakSet()


def print_document(document: dict[str, Any]) -> None:
    """Print a verb's document: the only one on this standard output, so what comes after it is not printed.

    What is not finite becomes null, since JSON has no word for it.
    """
    if sys.stdout in _told:
        return
    text = json.dumps(finite(document), allow_nan=False)
    # Noted first: after a signal in between, none is better than two.
    _told.add(sys.stdout)
    sys.stdout.write(f"{text}\n")


def finite(value: Any) -> Any:
    """The same with null for every number in it that is not finite."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
