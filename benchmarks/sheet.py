"""A report as people read it: a table, what was not measured, and the targets."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.text import Text

from benchmarks.report import Line, Report
from benchmarks.system import Absence
from benchmarks.target import Judgement
from quorate.observe.screen import Screen

UNBROKEN = 10**6
GAP = "  "
VERDICT_STYLES = {"met": "green", "missed": "bold red", "not measured": "yellow"}


def print_report(screen: Screen, report: Report, is_terminal: bool) -> None:
    """Print all of it. In a file no line is broken."""
    for line in report_lines(report, screen.width if is_terminal else UNBROKEN):
        screen.print(line, soft_wrap=True)


def report_lines(report: Report, width: int) -> Iterator[Text]:
    """The report on a screen of this width."""
    if report.stopped is not None and not report.lines:
        yield from _wrapped(f"{report.stopped[0]} before anything was measured", width)
        return
    yield Text(f"python -m benchmarks {report.bench}", style="bold")
    machine = report.machine
    for sentence in (report.headline, f"Median of {_rounds(report.rounds)} on {machine.sentence}.", machine.warning):
        yield from _wrapped(sentence, width)
    if report.lines:
        yield Text()
        yield from table_lines(report.lines, width)
    if report.absences:
        yield from _section("Not measured", (line for each in report.absences for line in _absence(each, width)))
    if report.judgements:
        yield from _section("Targets", (line for each in report.judgements for line in _judgement(each, width)))
    if report.stopped is not None:
        yield Text()
        yield from _wrapped(f"{report.stopped[0]}: these are the figures so far", width)


def table_lines(lines: Sequence[Line], width: int) -> Iterator[Text]:
    """One line for each row; where that is too wide, each case has a heading, and each row some lines."""
    named = list(dict.fromkeys(name for line in lines for name in line.remarks))
    spread = ["±"] if any(line.row.spread is not None for line in lines) else []
    rows = [("case", "system", "ms", *spread, *named), *(_cells(line, [*spread, *named]) for line in lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    if sum(widths) + len(GAP) * (len(widths) - 1) > width:
        yield from _narrow_lines(lines, width)
        return
    before = ""
    for number, row in enumerate(rows):
        shown = (row[0] if row[0] != before else "", *row[1:])
        before = row[0]
        yield Text(_aligned(shown, widths), style="" if number else "bold")


def milliseconds(ms: float) -> str:
    """To three digits, and none beyond the microsecond."""
    if ms >= 100:
        return f"{ms:,.0f}"
    if ms >= 10:
        return f"{ms:.1f}"
    return f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def _cells(line: Line, named: Sequence[str]) -> tuple[str, ...]:
    row = line.row
    shown = line.remarks if row.spread is None else {"±": f"{row.spread:.0%}", **line.remarks}
    return line.label, row.system, milliseconds(row.ms), *(shown.get(name, "") for name in named)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """All but the first two are numbers, and stand to the right."""
    words = [
        cell.rjust(width) if place > 1 else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return GAP.join(words).rstrip()


def _narrow_lines(lines: Sequence[Line], width: int) -> Iterator[Text]:
    for label, group in groupby(lines, key=lambda line: line.label):
        yield Text(label, style="bold")
        for line in group:
            spread = "" if line.row.spread is None else f" ± {line.row.spread:.0%}"
            yield from _wrapped(f"{line.row.system}: {milliseconds(line.row.ms)} ms{spread}", width, indent=2)
            remarks = ", ".join(f"{name} {remark}" for name, remark in line.remarks.items())
            yield from _wrapped(remarks, width, indent=4)


def _absence(absence: Absence, width: int) -> Iterator[Text]:
    yield from _wrapped(f"{absence.what}: {absence.reason}.", width, indent=2)
    if absence.command:
        yield from _wrapped(f"→ {absence.command}", width, indent=4)


def _judgement(judgement: Judgement, width: int) -> Iterator[Text]:
    value = "" if judgement.value is None else f"{judgement.value:.2f}"
    wanted = f"at {'least' if judgement.target.is_lowest else 'most'} {judgement.target.limit:g}"
    head = f"{judgement.verdict:<12}{GAP}{value:>8}{GAP}{wanted:<12}"
    first, *others = _wrapped(f"{head}{GAP}{judgement.target.text}", width, indent=2)
    first.stylize(VERDICT_STYLES[judgement.verdict], 2, 2 + len(judgement.verdict))
    yield from (first, *others)


def _section(heading: str, lines: Iterable[Text]) -> Iterator[Text]:
    yield Text()
    yield Text(heading, style="bold")
    yield from lines


def _wrapped(text: str, width: int, indent: int = 0) -> Iterator[Text]:
    for line in textwrap.wrap(
        text,
        max(width, indent + 24),
        initial_indent=" " * indent,
        subsequent_indent=" " * (2 * indent),
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield Text(line)


def _rounds(count: int) -> str:
    return f"{count} rounds" if count != 1 else "1 round"
