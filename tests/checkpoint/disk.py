"""A disk whose trouble comes at a chosen call: every call that changes it is counted, and one of them is spoilt."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHANGING = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
NEEDING_SPACE = ("open", "write", "fsync", "rename", "mkdir")

Trouble = Callable[[str, tuple[Any, ...]], None]


class Disk:
    """Counts the calls; `trouble` is called in place of, or just before, the call number `spoilt`."""

    def __init__(self, spoilt: int | None = None, trouble: Trouble | None = None) -> None:
        self.calls: list[str] = []
        self._spoilt = spoilt
        self._trouble = trouble

    @contextmanager
    def watched(self, names: tuple[str, ...] = CHANGING) -> Iterator["Disk"]:
        """While this lasts, the functions of `os` are watched."""
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(os, name, self._watch(name, getattr(os, name)))
            yield self

    def _watch(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            # Whoever only reads a file changes nothing; this is how `open_regular` does it.
            if name == "open" and arguments[1] & os.O_NONBLOCK and not arguments[1] & (os.O_CREAT | os.O_RDWR):
                return real(*arguments, **options)
            self.calls.append(name)
            if len(self.calls) - 1 == self._spoilt and self._trouble is not None:
                self._trouble(name, arguments)
            return real(*arguments, **options)

        return call


def killed(write: Callable[[], object], call: int, half_written: bool) -> bool:
    """Run `write` in a process that is killed at that call; whether it came to that."""
    real_write = os.write

    def die(name: str, arguments: tuple[Any, ...]) -> None:
        if half_written and name == "write":
            real_write(arguments[0], arguments[1][: len(arguments[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            with Disk(call, die).watched():
                write()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def full(name: str, arguments: tuple[Any, ...]) -> None:
    """No space left."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
