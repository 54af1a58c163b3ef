"""What code reaches for as it runs, such as a file beside its record: Python tells of it, whoever's code it is."""

import os
import sys
from functools import cache
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

from quorate.core.user_code import PACKAGE

# What Python says happens, in words, and which of its arguments says to what.
_EVENTS = {
    "open": ("opens", 0), "sqlite3.connect": ("opens", 0), "os.listdir": ("lists", 0), "os.scandir": ("lists", 0),
    "socket.connect": ("asks", 1), "socket.getaddrinfo": ("asks", 0), "subprocess.Popen": ("starts", 0),
    "os.system": ("starts", 0), "os.posix_spawn": ("starts", 0),
}  # fmt: skip
_CODE = {".py", ".pyc", ".so"}
# What was overheard by thread, while it is listened to: others read blocks at the same time.
_listened: dict[int, list[str]] = {}


class Listening:
    """Within it, whatever this thread opens, lists, asks or starts is in `heard`; what belongs to an import is not."""

    __slots__ = ("_before", "heard")

    def __init__(self) -> None:
        _install()
        self.heard: list[str] = []

    def __enter__(self) -> "Listening":
        self._before = _listened.get(get_ident())
        _listened[get_ident()] = self.heard
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del _listened[get_ident()]
        else:
            _listened[get_ident()] = self._before


@cache
def _install() -> None:
    """Once, and only where it is needed: there is no way back."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listened or event not in _EVENTS:
        return
    heard = _listened.get(get_ident())
    if heard is None:
        return
    verb, position = _EVENTS[event]
    subject = arguments[position]
    # A number is of a file that was opened before. Whatever went wrong here would be raised by what is overheard.
    if isinstance(subject, int) or _is_import(sys._getframe(1)):
        return
    what = os.fsdecode(subject) if isinstance(subject, str | bytes | os.PathLike) else str(subject)
    if not (verb == "opens" and _is_code(what)):
        heard.append(f"{verb} {what}")


def _is_import(frame: FrameType | None) -> bool:
    """Whether a module is being imported, by code that we have called."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _is_code(file: str) -> bool:
    """A file that can be imported, which is opened to show a line of it."""
    path = Path(file).absolute()
    return path.suffix in _CODE and any(
        path.is_relative_to(Path(folder).absolute()) for folder in sys.path if isinstance(folder, str)
    )
