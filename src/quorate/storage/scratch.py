"""Folders for what is thrown away: by whoever made them or, if that was killed, by the next one who makes one."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quorate.core.errors import RequestError
from quorate.storage.atomic import discard
from quorate.storage.lock import hold, holder_of

PREFIX = "quorate-aside-"
# Its name says that the folder is ours to remove: a person may call a folder of their own as we call ours.
_LOCK = "aside.lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for runs that nobody will look at later."""
    with contextlib.ExitStack() as stack:
        try:
            parent = Path(tempfile.gettempdir())
            _sweep(parent)
            folder = _make(parent, stack)
        except OSError as error:
            raise RequestError(
                f"cannot make a folder for temporary files: {error.strerror or error}. Choose another with TMPDIR."
            ) from error
        yield folder


def _make(parent: Path, stack: contextlib.ExitStack) -> Path:
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    folder = parent / hidden.name.removeprefix(".")
    stack.callback(discard, folder)
    stack.callback(discard, hidden)
    # Named once the lock is held: one that is found without its holder is one whose holder is dead.
    stack.enter_context(hold(hidden / _LOCK))
    return hidden.rename(folder)


def _sweep(parent: Path) -> None:
    """Remove what was left by processes that were killed: the lock of each tells whether it lives, in any container."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed just now by somebody else
            lock = folder / _LOCK
            if folder.lstat().st_uid == os.getuid() and lock.is_file() and holder_of(lock) is None:
                discard(folder)
