"""A list of runs as a table that fits a terminal, with the searches beside them."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from quorate.cli.errors import print_labelled
from quorate.cli.layout import GAP, STATUS_STYLES, Page, headed_table
from quorate.cli.output import NONE, print_document
from quorate.core.runs_folder import searches_in, where_looked
from quorate.history.documents import runs_document
from quorate.history.run_record import Listing, RunQuery, RunRecord, Status, has_task, short_task
from quorate.observe.quantities import age, measure, some_of
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import those_that_wait

WORDS_SHOWN = 8


def ask_ray(runs: Iterable[RunFolder]) -> None:
    """Ask Ray about runs that wait for it, before they are shown, and say why where that cannot be asked."""
    if waiting := those_that_wait(runs):
        from quorate.engines.ray.jobs import ask_about_submitted

        for problem in ask_about_submitted(waiting):
            print_labelled("note", problem)


def list_runs(folder: Path, query: RunQuery, as_json: bool) -> None:
    """Print the runs of a folder that fit a query, and below them its searches that do: by name, status and task."""
    ask_ray(RunFolder.all_in(folder))
    listing, now = Listing.read(folder, query), datetime.now(UTC)
    if not searches_in(folder):
        print_document(runs_document(listing, now)) if as_json else print_listing(Page(), listing, now)
        return
    # Only here: few folders have one, and what reads them takes time to import.
    from quorate.cli.search_view import search_table
    from quorate.tune.findings import search_summary
    from quorate.tune.folder import SearchFolder
    from quorate.tune.result import SearchResult

    records = [SearchResult.read(search, with_runs=False) for search in reversed(SearchFolder.all_in(folder))]
    fitting = [
        record
        for record in records
        if record.search.startswith(query.name)
        and (not query.statuses or record.status in query.statuses)
        and (not query.task or has_task(str(record.keys_of_job.get("task", "")), query.task))
    ]
    if as_json:
        print_document(runs_document(listing, now, [search_summary(record) for record in fitting]))
        return
    page = Page()
    if listing.records or not fitting:
        print_listing(page, listing, now)
    if fitting and listing.records:
        page.line("")
    if fitting:
        page.table(search_table(fitting[: query.limit], now))


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
        "steps": lambda record: Text(record.progress),
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
