"""A list of runs as a table that fits a terminal, and the words by which a run is shown."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from quorate.api.ray_jobs import ask_about_submitted
from quorate.cli.errors import print_labelled
from quorate.cli.layout import GAP, NONE, Page, headed_table
from quorate.cli.output import print_document
from quorate.core.runs_folder import where_looked
from quorate.history.documents import runs_document
from quorate.history.run_record import Listing, RunQuery, RunRecord, Status
from quorate.observe.quantities import measure, some_of
from quorate.storage.run_folder import RunFolder
from quorate.storage.search_folder import SearchFolder

WORDS_SHOWN = 8
STATUS_STYLES = {
    Status.RUNNING: "cyan",
    Status.SUBMITTED: "cyan",
    Status.COMPLETE: "green",
    Status.INTERRUPTED: "yellow",
    Status.TERMINATED: "yellow",
    Status.LOST: "red",
    Status.FAILED: "red",
    Status.DAMAGED: "red",
}
_UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def ask_ray(runs: Iterable[RunFolder]) -> None:
    """Ask Ray about runs that wait for it, before they are shown, and say why where that cannot be asked."""
    for problem in ask_about_submitted(runs):
        print_labelled("note", problem)


def list_runs(folder: Path, query: RunQuery, as_json: bool) -> None:
    """Print the runs of a folder that fit a query."""
    ask_ray(RunFolder.all_in(folder))
    listing, now = Listing.read(folder, query), datetime.now(UTC)
    found = SearchFolder.all_in(folder)
    if not found:
        print_document(runs_document(listing, now)) if as_json else print_listing(Page(), listing, now)
        return
    # Only here: few folders have one, and what reads them takes time to import.
    from quorate.cli.search_view import list_searches

    list_searches(found, listing, now, as_json)


def print_listing(page: Page, listing: Listing, now: datetime) -> None:
    """Print the runs that fit, and what to do where there are none."""
    if not listing.records:
        page.line(
            f"There are no runs in {where_looked(listing.folder)} yet. `quorate train JOB.yaml` makes one; "
            "--runs FOLDER looks elsewhere."
        )
        return
    if not listing.fitting:
        query = listing.query
        asked = [f"--status {status}" for status in query.statuses]
        asked += [f"--task {shlex.quote(query.task)}"] if query.task else []
        asked += [f"--name {shlex.quote(query.name)}"] if query.name else []
        page.line(
            f"None of the {len(listing.records):,} runs in {listing.folder.absolute()} fits {' '.join(asked)}. "
            f"There are: {_there_are(listing)}."
        )
        return
    page.table(run_table(listing.shown, now, page.screen.width))
    left_out = len(listing.fitting) - len(listing.shown)
    if left_out:
        page.line(f"and {left_out:,} more")
    for record in listing.shown:
        if record.status is Status.DAMAGED or (record.status is Status.FAILED and record.reason):
            page.line(f"{record.name} is {record.status}: {record.reason}")


def run_table(records: Sequence[RunRecord], now: datetime, width: int) -> Table:
    """As many columns as fit, the important ones first; a name is folded if need be, never cut."""
    columns: dict[str, Callable[[RunRecord], Text]] = {
        "name": lambda record: Text(record.name),
        "status": lambda record: Text(record.status.value, style=STATUS_STYLES[record.status]),
        "steps": lambda record: Text(progress(record)),
        "best": lambda record: Text(
            f"{record.best.watched.metric} {measure(record.best.value)}" if record.best else NONE
        ),
        "age": lambda record: Text(age(record.age(now))),
        "task": lambda record: Text(short_task(record.task) or NONE, style="dim"),
    }
    cells = {heading: [cell(record) for record in records] for heading, cell in columns.items()}
    widths = {
        heading: max(map(cell_len, [heading, *(cell.plain for cell in column)])) for heading, column in cells.items()
    }
    shown = list(widths)
    while len(shown) > 2 and sum(widths[heading] + GAP for heading in shown) - GAP > width:
        shown.pop()
    # What stands behind the name is short, so that only the name gives way.
    return headed_table(shown, whole=shown[1:], rows=zip(*(cells[heading] for heading in shown), strict=True))


def _there_are(listing: Listing) -> str:
    """The words that would have found something."""
    found = {
        "status": [record.status.value for record in listing.records],
        "task": [short_task(record.task) for record in listing.records] if listing.query.task else [],
        "name": [record.name for record in listing.records] if listing.query.name else [],
    }
    return "; ".join(f"{what} {some_of(sorted(set(words)), WORDS_SHOWN)}" for what, words in found.items() if words)


def ago(seconds: float) -> str:
    """How long ago something was, to one unit."""
    return f"{age(seconds)} ago" if seconds >= 1 else "just now"


def age(seconds: float) -> str:
    """A time span to one unit: 3 minutes, 1 day."""
    for length, unit in _UNITS:
        if seconds >= length:
            whole = int(seconds // length)
            return f"{whole} {unit}" if whole == 1 else f"{whole} {unit}s"
    return f"{int(seconds)} s"


def progress(record: RunRecord) -> str:
    """The steps done, and how many there are to be."""
    return f"{record.steps:,}" + ("" if record.total_steps is None else f"/{record.total_steps:,}")


def short_task(reference: str) -> str:
    """A task without the folder that its file is in."""
    place, colon, class_name = reference.rpartition(":")
    return f"{place.rpartition('/')[2]}{colon}{class_name}"
