"""A folder that a process has on its host for as long as it lives."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "quorate-host-"


class Scratch:
    """A folder for as long as this process lives. What agents that were killed have left is removed by the next one
    on the same machine: a folder whose owner lives is locked."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            descriptor = self._locked(left)
            if descriptor is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(descriptor)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            descriptor = self._locked(self.path)
            if descriptor is not None:  # otherwise another agent took it for one that was left
                self._descriptor = descriptor
                break

    @staticmethod
    def _locked(folder: Path) -> int | None:
        """The lock of a folder; None where another process has it, or there is none of ours."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.getuid() and folder.exists():
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
        return None

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)
