"""Folders for runs that nobody will look at later, and checkpoints that stay while they are read."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quorate.checkpoint.listing import CheckpointInfo
from quorate.core.errors import CheckpointError, RequestError
from quorate.storage.atomic import discard
from quorate.storage.lock import hold, holder_of
from quorate.storage.run_folder import RunFolder

SCRATCH = "quorate-aside-"
# Its name says that the folder is ours to remove: a person may call a folder of their own as we call ours.
_SCRATCH_LOCK = "aside.lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for runs that nobody will look at later: removed by whoever made it or, if that was killed, by the next
    one who makes one."""
    with contextlib.ExitStack() as stack:
        try:
            parent = Path(tempfile.gettempdir())
            _sweep(parent)
            hidden = Path(tempfile.mkdtemp(prefix=f".{SCRATCH}", dir=parent))
            folder = parent / hidden.name.removeprefix(".")
            stack.callback(discard, folder)
            stack.callback(discard, hidden)
            # Named once the lock is held: one that is found without its holder is one whose holder is dead.
            stack.enter_context(hold(hidden / _SCRATCH_LOCK))
            hidden.rename(folder)
        except OSError as error:
            raise RequestError(
                f"cannot make a folder for temporary files: {error.strerror or error}. Choose another with TMPDIR."
            ) from error
        yield folder


def _sweep(parent: Path) -> None:
    """Remove what was left by processes that were killed: the lock of each tells whether it lives, in any container."""
    for folder in parent.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, or removed just now by somebody else
            lock = folder / _SCRATCH_LOCK
            if folder.lstat().st_uid == os.getuid() and lock.is_file() and holder_of(lock) is None:
                discard(folder)


def hold_checkpoint(run: RunFolder, info: CheckpointInfo, scratch: Path) -> Path:
    """Where a checkpoint of a run can be read for as long as it takes: a job that is under way prunes its own."""
    if run.holder() is None:
        return info.path
    safe = scratch / "held" / info.path.name
    safe.mkdir(parents=True)
    try:
        for file in info.path.iterdir():
            try:
                os.link(file, safe / file.name)
            except OSError:  # another disk, or one without links
                shutil.copyfile(file, safe / file.name)
    except FileNotFoundError as error:
        shutil.rmtree(safe)
        raise CheckpointError(
            f"checkpoint {info.path.name} of run {run.name} was removed by the running job, which keeps the last "
            "`checkpoint.keep`. Try again"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot copy checkpoint {info.path.name} of run {run.name}, which is running, to {scratch}: "
            f"{error.strerror or error}. Choose another folder with TMPDIR, or wait for the run's end"
        ) from error
    return safe
