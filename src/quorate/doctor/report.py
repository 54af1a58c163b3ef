"""What the checks have found: a line for each and what to do about it, a document for programs, and an exit code."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.text import Text

from quorate.observe.screen import Screen


class Level(Enum):
    """How much a finding matters: only a problem keeps jobs from running as they should."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it is, and what to do about it."""

    name: str
    level: Level
    text: str
    remedy: str = ""


COLOURS = {Level.OK: "green", Level.NOTE: "blue", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
LEVEL_COLUMN = 9
TEXT_COLUMN = 27
NARROW = 60
UNBROKEN = 10**6


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if something keeps jobs from running as they should."""
    return 1 if any(finding.level is Level.PROBLEM for finding in findings) else 0


def to_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """All findings as one JSON document."""
    levels = Counter(finding.level for finding in findings)
    return {
        "status": "problem" if levels[Level.PROBLEM] else "ok",
        "exit_code": exit_code(findings),
        "problems": levels[Level.PROBLEM],
        "warnings": levels[Level.WARNING],
        "findings": [
            {"name": each.name, "level": each.level.value, "text": each.text, "remedy": each.remedy or None}
            for each in findings
        ],
    }


def print_findings(findings: Iterable[Finding], screen: Screen) -> list[Finding]:
    """Print findings as they come, and what they come to; returns them all.

    In a file no line is broken: what is to be typed is copied in one piece.
    """
    shown = []
    for finding in findings:
        for line in lines_of(finding, screen.width if screen.is_terminal else UNBROKEN):
            screen.print(line, soft_wrap=True)
        shown.append(finding)
    screen.print()
    screen.print(verdict(shown), soft_wrap=True)
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
    levels = Counter(finding.level for finding in findings)
    problems, warnings = levels[Level.PROBLEM], levels[Level.WARNING]
    counted = f"{warnings or 'no'} warning{'' if warnings == 1 else 's'}"
    if problems:
        return Text(f"{problems} problem{'' if problems == 1 else 's'} and {counted}.", COLOURS[Level.PROBLEM])
    if warnings:
        return Text(f"No problem, {counted}: jobs can run here.", COLOURS[Level.WARNING])
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
