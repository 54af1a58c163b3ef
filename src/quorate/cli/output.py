"""Standard output and standard error as the command writes to them, and the one JSON document of a verb."""

import io
import json
import os
import sys
from typing import Any, TextIO
from weakref import WeakSet

from quorate.core.errors import OutputError
from quorate.storage.run_folder import finite

STDOUT, STDERR = 1, 2
_printed_on: WeakSet[TextIO] = WeakSet()


class _Stdout(io.FileIO):
    """Says once that it cannot be written to, and is silent from then on: Python flushes again when it ends.

    Nothing is said of a reader that has seen enough, such as `head`: the command goes on and ends as it would.
    """

    def __init__(self) -> None:
        super().__init__(STDOUT, "w", closefd=False)
        self._is_lost = False

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if not self._is_lost and not isinstance(error, BrokenPipeError):
                self._is_lost = True
                raise OutputError(f"cannot write to standard output: {error.strerror}.") from None
        return len(memoryview(data))  # type: ignore[arg-type]


class _Stderr(io.FileIO):
    """Falls silent when nobody reads it any more: a terminal that was closed must not keep a job from ending well."""

    def __init__(self) -> None:
        super().__init__(STDERR, "w", closefd=False)

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return len(memoryview(data))  # type: ignore[arg-type]


def guard_output() -> None:
    """From now on a full standard output raises `OutputError`; trouble with standard error is nobody's."""
    for number in (STDOUT, STDERR):
        _keep_open(number)
    sys.stdout = _text(_Stdout(), sys.stdout)
    sys.stderr = _text(_Stderr(), sys.stderr)


def _keep_open(number: int) -> None:
    # With one that is closed, the next file that is opened would take its number, and be printed into.
    try:
        os.fstat(number)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _text(raw: io.FileIO, before: TextIO | None) -> TextIO:
    is_stderr = raw.fileno() == STDERR
    encoding = "utf-8" if before is None else before.encoding
    # A character that the encoding does not have must not end the command either.
    errors = "backslashreplace" if before is None or is_stderr or before.errors == "strict" else before.errors
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=is_stderr or raw.isatty())


def print_document(document: dict[str, Any]) -> None:
    """Print a verb's document: the only one on this standard output, so what comes after it is not printed.

    What is not finite becomes null, since JSON has no word for it.
    """
    if sys.stdout in _printed_on:
        return
    text = json.dumps(finite(document), allow_nan=False)
    # Noted first: after a signal in between, none is better than two.
    _printed_on.add(sys.stdout)
    sys.stdout.write(f"{text}\n")
