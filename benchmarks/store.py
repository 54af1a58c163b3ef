"""Where the processes of torch.distributed find each other: a file, which takes no port from anybody."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def fresh_store(folder: str) -> Iterator[Path]:
    """The path of a file that is not there yet, and is not there afterwards."""
    path = Path(folder) / f"store-{secrets.token_hex(4)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
