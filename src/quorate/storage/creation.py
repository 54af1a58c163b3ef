"""When a run was created, as a file in its folder says."""

import contextlib
from datetime import UTC, datetime
from pathlib import Path

from quorate.core.regular_file import read_regular
from quorate.storage.atomic import write_atomically

_FILE = "created"


def write_creation(folder: Path, moment: datetime | None = None) -> None:
    """Say that a run is created now; or that it was, at another place."""
    write_atomically(folder / _FILE, f"{(moment or datetime.now(UTC)).isoformat()}\n")


def is_marked(folder: Path) -> bool:
    """Whether a folder says when it was created."""
    return (folder / _FILE).is_file()


def read_creation(folder: Path) -> datetime:
    """When a run was created. What is written counts: the times of files change when a run is copied."""
    marker = folder / _FILE
    with contextlib.suppress(OSError, ValueError):
        written = datetime.fromisoformat(read_regular(marker).decode().strip())
        return written if written.tzinfo else written.replace(tzinfo=UTC)
    # The folder's own time changes with its content: it is the last resort.
    existing = marker if marker.is_file() else folder
    return datetime.fromtimestamp(existing.stat().st_mtime, UTC)
