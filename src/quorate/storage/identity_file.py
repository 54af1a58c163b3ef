"""The file in a run's folder that says what its bits depend on."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from quorate.core.regular_file import read_regular
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder

IDENTITY = "identity.json"
"""What the bits of the run depend on, as its first worker has found it."""


def write_identity(run: RunFolder, found: Mapping[str, Any]) -> None:
    """Keep what a run's identity is made of. Where there is no room for it there is none: an earlier one is wrong."""
    try:
        write_atomically(run.path / IDENTITY, f"{json.dumps(found, indent=1)}\n")
    except OSError:
        (run.path / IDENTITY).unlink(missing_ok=True)


def read_identity(run: RunFolder) -> dict[str, Any] | None:
    """The same; None where none was written, or it cannot be read: nobody relies on one that may be damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_regular(run.path / IDENTITY))
        return found if isinstance(found, dict) else None
    return None
