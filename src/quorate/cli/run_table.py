"""A list of runs as a table that fits a terminal."""

import shlex
from collections.abc import Callable, Sequence
from datetime import datetime

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from quorate.cli.page import Page
from quorate.cli.run_words import STATUS_STYLES, age, progress, short_task
from quorate.history.run_list import Listing
from quorate.history.run_record import RunRecord, Status
from quorate.observe.quantities import measure

GAP = 2
NONE = "-"
WORDS_SHOWN = 8


def print_listing(page: Page, listing: Listing, now: datetime) -> None:
    """Print the runs that fit, and what to do where there are none."""
    if not listing.records:
        page.line(
            f"There are no runs in the folder {listing.folder} yet. `quorate train JOB.yaml` makes one; "
            "--runs looks elsewhere."
        )
        return
    if not listing.fitting:
        page.line(_none_fits(listing))
        return
    page.table(run_table(listing.shown, now, page.screen.width))
    left_out = len(listing.fitting) - len(listing.shown)
    if left_out:
        page.line(f"and {left_out:,} more")
    for record in listing.shown:
        if record.status is Status.DAMAGED:
            page.line(f"{record.name} is damaged: {record.reason}")


def run_table(records: Sequence[RunRecord], now: datetime, width: int) -> Table:
    """As many columns as fit, the important ones first; a name is folded if need be, never cut."""
    columns: dict[str, Callable[[RunRecord], Text]] = {
        "name": lambda record: Text(record.name),
        "status": lambda record: Text(record.status.value, style=STATUS_STYLES[record.status]),
        "steps": lambda record: Text(progress(record)),
        "best": lambda record: Text(_best(record)),
        "age": lambda record: Text(age(record.age(now))),
        "task": lambda record: Text(short_task(record.task) or NONE, style="dim"),
    }
    cells = {heading: [cell(record) for record in records] for heading, cell in columns.items()}
    shown = _fitting({heading: _width(heading, column) for heading, column in cells.items()}, width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for heading in shown:
        # What stands behind the name is short, so that only the name gives way.
        table.add_column(heading, overflow="fold", no_wrap=heading != "name")
    for row in zip(*(cells[heading] for heading in shown), strict=True):
        table.add_row(*row)
    return table


def _none_fits(listing: Listing) -> str:
    query = listing.query
    asked = [f"--status {status}" for status in query.statuses]
    asked += [f"--task {shlex.quote(query.task)}"] if query.task else []
    asked += [f"--name {shlex.quote(query.name)}"] if query.name else []
    return (
        f"None of the {len(listing.records):,} runs in the folder {listing.folder} fits {' '.join(asked)}. "
        f"There are: {_there_are(listing)}."
    )


def _there_are(listing: Listing) -> str:
    """The words that would have found something."""
    found = {
        "status": [record.status.value for record in listing.records],
        "task": [short_task(record.task) for record in listing.records] if listing.query.task else [],
        "name": [record.name for record in listing.records] if listing.query.name else [],
    }
    return "; ".join(f"{what} {_some(sorted(set(words)))}" for what, words in found.items() if words)


def _some(words: list[str]) -> str:
    more = f" and {len(words) - WORDS_SHOWN} more" if len(words) > WORDS_SHOWN else ""
    return ", ".join(words[:WORDS_SHOWN]) + more


def _fitting(widths: dict[str, int], room: int) -> list[str]:
    shown = list(widths)
    while len(shown) > 2 and sum(widths[heading] + GAP for heading in shown) - GAP > room:
        shown.pop()
    return shown


def _width(heading: str, column: Sequence[Text]) -> int:
    return max([cell_len(heading), *(cell_len(cell.plain) for cell in column)])


def _best(record: RunRecord) -> str:
    best = record.best
    return NONE if best is None else f"{best.watched.metric} {measure(best.value)}"
