"""Text broken between words, so that it reads well on a terminal of any width."""

import textwrap

INDENT = 2


def fold(text: str, width: int) -> str:
    """Each line broken to the width, what is broken off being indented; a path or digest is never broken."""
    return "\n".join(_folded(line, width) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip(" "))
    if len(line) <= width:
        return line
    return textwrap.fill(
        line[indent:],
        max(width, indent + 4 * INDENT),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + INDENT),
        break_long_words=False,
        break_on_hyphens=False,
    )
