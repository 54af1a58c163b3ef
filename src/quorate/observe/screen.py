"""The terminal or file that people look at, through rich."""

import io
from typing import TextIO, cast

from rich.console import Console


class Screen(Console):
    """A rich console that shows text as it is: losses are not coloured by guesswork, "[red]" in a message is text."""

    def __init__(self, stream: TextIO, is_terminal: bool, width: int | None = None) -> None:
        super().__init__(
            file=cast(TextIO, _Forgiving(stream)),
            force_terminal=is_terminal,
            width=width,
            highlight=False,
            markup=False,
            emoji=False,
        )


class _Forgiving(io.TextIOBase):
    """A stream that falls silent when nobody reads it any more: `| head` or a closed terminal must not end a job."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._encoding = stream.encoding or "utf-8"

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except OSError:
                self._stream = None
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError:
                self._stream = None
