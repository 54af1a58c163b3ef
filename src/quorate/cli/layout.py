"""Labelled lines and tables that fit a terminal of any width, and stay whole in a file."""

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from quorate.observe.screen import Screen, lines_of

LABEL = 13
INDENT = 2
GAP = 2
NARROWEST_TEXT = 16
# In a file nothing is broken: it is searched, not looked at.
FILE_WIDTH = 100_000
STATUS_STYLES = {
    "running": "cyan",
    "submitted": "cyan",
    "complete": "green",
    "interrupted": "yellow",
    "terminated": "yellow",
    "lost": "red",
    "failed": "red",
    "damaged": "red",
}


class Page:
    """What is printed about one thing: titles, rows of label and text, tables."""

    def __init__(self, stream: TextIO | None = None, is_terminal: bool | None = None, width: int | None = None) -> None:
        """On standard output, if nothing else is given."""
        stream = sys.stdout if stream is None else stream
        is_terminal = stream.isatty() if is_terminal is None else is_terminal
        self.screen = Screen(stream, is_terminal, width if is_terminal or width else FILE_WIDTH)

    @property
    def text_width(self) -> int:
        """How many characters of a row's text fit on a line."""
        return max(NARROWEST_TEXT, self.screen.width - INDENT - LABEL)

    def title(self, text: Text) -> None:
        self.screen.print(text, soft_wrap=True)

    def line(self, text: str) -> None:
        """A sentence by itself."""
        for line in Text(text).wrap(self.screen, self.screen.width):
            line.rstrip()
            self.screen.print(line, soft_wrap=True)

    def section(self, heading: str) -> None:
        """A heading with an empty line before it."""
        self.screen.print()
        self.screen.print(Text(heading, style="bold"))

    def row(self, label: str, text: str | Text) -> None:
        """A label with a text behind it, broken between words where it is too long for the terminal."""
        content = Text(text) if isinstance(text, str) else text
        for line in content.wrap(self.screen, self.text_width):
            line.rstrip()
            self.whole(label, line)
            label = ""

    def whole(self, label: str, text: str | Text) -> None:
        """A label with a text that is copied in one piece, such as a digest, a path or a command."""
        head = f"{label} " if len(label) >= LABEL else f"{label:<{LABEL}}"
        self.screen.print(Text.assemble((f"{' ' * INDENT}{head}", "dim"), text), soft_wrap=True)

    def items(self, label: str, items: Sequence[str], style: str = "") -> None:
        """A label with an enumeration behind it, broken between its items if possible."""
        listed = [*(f"{item}," for item in items[:-1]), *items[-1:]]
        for line in lines_of(listed, self.text_width, " "):
            # An item by itself may be too long for any line.
            self.row(label, Text(line, style=style))
            label = ""

    def columns(self, rows: Sequence[Sequence[str | Text]]) -> None:
        """Columns below each other, folded where they do not fit."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        for _ in rows[0] if rows else ():
            table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        self.table(table, INDENT)

    def table(self, table: Table, indent: int = 0) -> None:
        """A table, without the spaces that would fill up its last column."""
        options = self.screen.options.update_width(self.screen.width - indent)
        for segments in self.screen.render_lines(table, options, pad=False):
            line = Text.assemble(" " * indent, *((segment.text, segment.style or "") for segment in segments))
            line.rstrip()
            self.screen.print(line, soft_wrap=True)


def headed_table(
    headings: Sequence[str], whole: Sequence[str] = (), rows: Iterable[Sequence[str | Text]] = ()
) -> Table:
    """A table without lines. What does not fit is folded, except in the columns that are `whole`."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        is_whole = heading in whole
        table.add_column(Text(heading), overflow="ellipsis" if is_whole else "fold", no_wrap=is_whole)
    for row in rows:
        table.add_row(*row)
    return table
