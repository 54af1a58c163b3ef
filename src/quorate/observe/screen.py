"""The terminal or file that people look at, through rich."""

import io
import os
from collections.abc import Sequence
from typing import TextIO, cast

from rich.cells import cell_len
from rich.console import Console

IN_ASCII = str.maketrans({"…": "...", "×": "x", "→": "->", "−": "-", "–": "-", "—": "-", "━": "-", "╸": " ", "╺": " "})


class Screen(Console):
    """A rich console that shows text as it is: losses are not coloured by guesswork, "[red]" in a message is text.

    `NO_COLOR` takes colours away and `FORCE_COLOR` gives them to a file too; a file never gets a bar that moves.
    """

    def __init__(self, stream: TextIO, is_terminal: bool | None = None, width: int | None = None) -> None:
        is_terminal = stream.isatty() if is_terminal is None else is_terminal
        wants_colours = os.environ.get("FORCE_COLOR", "") not in ("", "0")
        super().__init__(
            file=cast(TextIO, _Forgiving(stream)),
            force_terminal=is_terminal,
            force_jupyter=False,
            color_system="auto" if is_terminal else "standard" if wants_colours else None,
            width=width,
            highlight=False,
            markup=False,
            emoji=False,
        )


class _Forgiving(io.TextIOBase):
    """A stream that ends no job.

    It falls silent when nobody reads it any more (`| head`, a closed terminal), and a character that its encoding does
    not have is written as a similar one, or by its number.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._encoding = stream.encoding or "utf-8"

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(self._encodable(text))
            except OSError:
                self._stream = None
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError:
                self._stream = None

    def _encodable(self, text: str) -> str:
        try:
            text.encode(self._encoding)
            return text
        except UnicodeEncodeError:
            return text.translate(IN_ASCII).encode(self._encoding, "backslashreplace").decode(self._encoding)


def lines_of(facts: Sequence[str], width: int, gap: str = "   ") -> list[str]:
    """The facts in order, in as few lines as the width allows."""
    lines: list[str] = []
    for fact in facts:
        longer = f"{lines[-1]}{gap}{fact}" if lines else fact
        if lines and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(fact)
    return lines
