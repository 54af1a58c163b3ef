"""The findings as a person reads them: a line for each, and under it what to do about it."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.text import Text

from quorate.doctor.finding import Finding, Level
from quorate.doctor.report import count
from quorate.observe.screen import Screen

COLOURS = {Level.OK: "green", Level.NOTE: "blue", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
LEVEL_COLUMN = 9
TEXT_COLUMN = 27
NARROW = 60
UNBROKEN = 10**6


class Sheet:
    """Where findings are shown. In a file no line is broken: what is to be typed is copied in one piece."""

    def __init__(self, stream: TextIO, is_terminal: bool, width: int | None = None) -> None:
        self._screen = Screen(stream, is_terminal, width)
        self._width = self._screen.width if is_terminal else UNBROKEN

    def show(self, findings: Iterable[Finding]) -> list[Finding]:
        """Print findings as they come, and what they come to; returns them all."""
        shown = []
        for finding in findings:
            for line in lines_of(finding, self._width):
                self._screen.print(line, soft_wrap=True)
            shown.append(finding)
        self._screen.print()
        self._screen.print(verdict(shown), soft_wrap=True)
        return shown


def lines_of(finding: Finding, width: int) -> list[Text]:
    """A finding on a screen of this width; nothing that a person might copy is broken inside a word."""
    level = f"{finding.level.value:<{LEVEL_COLUMN}}"
    narrow = width < NARROW
    indent = " " * (2 if narrow else TEXT_COLUMN)
    head = f"{level}{finding.name}" if narrow else f"{level}{finding.name}  ".ljust(TEXT_COLUMN)
    texts = [head] if narrow else []
    texts += _wrapped(finding.text, width, indent if narrow else head, indent)
    texts += _wrapped(finding.remedy, width, f"{indent}→ ", f"{indent}  ") if finding.remedy else []
    first, *others = [Text(line) for line in texts]
    first.stylize(COLOURS[finding.level], 0, len(finding.level.value))
    first.stylize("bold", LEVEL_COLUMN, LEVEL_COLUMN + len(finding.name))
    return [first, *others]


def verdict(findings: Sequence[Finding]) -> Text:
    """All findings in one sentence."""
    problems, warnings = count(findings, Level.PROBLEM), count(findings, Level.WARNING)
    if problems:
        return Text(f"{_counted(problems, 'problem')} and {_counted(warnings, 'warning')}.", COLOURS[Level.PROBLEM])
    if warnings:
        return Text(f"No problem, {_counted(warnings, 'warning')}: jobs can run here.", COLOURS[Level.WARNING])
    return Text("All is well: jobs can run here.", COLOURS[Level.OK])


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, len(others) + 20),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _counted(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
