"""The one JSON document that a verb prints with `--json`, whatever becomes of the verb."""

import json
import sys
from typing import Any, TextIO
from weakref import WeakSet

from quorate.core.finite import finite

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
