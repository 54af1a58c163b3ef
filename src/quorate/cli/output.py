"""Standard output and standard error as the command writes to them, and the one JSON document of a verb."""

import io
import json
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO
from weakref import WeakSet

from quorate.core.errors import OutputError
from quorate.storage.run_folder import finite

NONE = "-"
"""What stands in a table where there is nothing."""

STDOUT, STDERR = 1, 2
_printed_on: WeakSet[TextIO] = WeakSet()


class _Stream(io.FileIO):
    """Standard output says once that it cannot be written to, and is silent from then on: Python flushes again when it
    ends. Nothing is said of a reader that has seen enough, such as `head`: the command goes on and ends as it would.

    Standard error is silent at once: a terminal that was closed must not keep a job from ending well.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._is_silent = number == STDERR

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if not self._is_silent and not isinstance(error, BrokenPipeError):
                self._is_silent = True
                raise OutputError(f"cannot write to standard output: {error.strerror}.") from None
        return len(memoryview(data))  # type: ignore[arg-type]


def guard_output() -> None:
    """From now on a full standard output raises `OutputError`; trouble with standard error is nobody's."""
    for number in (STDOUT, STDERR):
        # With one that is closed, the next file that is opened would take its number, and be printed into.
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    sys.stdout = _text(_Stream(STDOUT), sys.stdout)
    sys.stderr = _text(_Stream(STDERR), sys.stderr)


def _text(raw: io.FileIO, before: TextIO | None) -> TextIO:
    is_stderr = raw.fileno() == STDERR
    encoding = "utf-8" if before is None else before.encoding
    # A character that the encoding does not have must not end the command either.
    errors = "backslashreplace" if before is None or is_stderr or before.errors == "strict" else before.errors
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=is_stderr or raw.isatty())


def print_answer(as_json: bool, document: dict[str, Any], sentence: str) -> None:
    """Print what a verb has done: as its document, or in a sentence for people."""
    if as_json:
        print_document(document)
    else:
        print(sentence)


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


def print_growing_document(document: dict[str, Any], name: str, items: Iterable[Any]) -> None:
    """Print a verb's document whose last field is a list, item by item, one a line: there may be gigabytes of them, or
    the last may come in an hour. It is whole also where Ctrl-C ends the command."""
    _printed_on.add(sys.stdout)
    sys.stdout.write(f"{json.dumps(finite(document), allow_nan=False)[:-1]}, {json.dumps(name)}: [")
    between = ""
    try:
        for item in items:
            sys.stdout.write(f"{between}\n{json.dumps(finite(item), allow_nan=False)}")
            between = ","
            sys.stdout.flush()
    finally:
        sys.stdout.write("]}\n")
