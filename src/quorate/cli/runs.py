"""`quorate runs`."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.document import print_document
from quorate.cli.options import RUNS, Json, Runs


def runs(
    context: typer.Context,
    folder: Runs = RUNS,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: running, failed, lost, damaged, interrupted, terminated or complete. Repeatable."
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="Only runs of this task: its class, its file, or both.")] = "",
    name: Annotated[str, typer.Option(metavar="PREFIX", help="Only runs whose name begins like this.")] = "",
    sort: Annotated[str, typer.Option(help="By age, name, status, steps or metric.")] = "age",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="At most so many.")] = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first: how each stands, how far it has come, and its best metric.

    A run is lost if it was killed together with its launcher, and damaged if its files cannot be read.

    Examples:

      quorate runs --status failed --status lost

      quorate runs --sort metric --limit 5
    """
    from quorate.cli.page import Page
    from quorate.cli.run_document import runs_document
    from quorate.cli.run_table import print_listing
    from quorate.cli.word import one_word
    from quorate.history.run_list import Listing, Order, RunQuery
    from quorate.history.run_record import Status

    query = RunQuery(
        statuses=tuple(one_word(word, Status, "--status") for word in status or ()),
        task=task,
        name=name,
        order=one_word(sort, Order, "--sort"),
        reverse=reverse,
        limit=limit,
    )
    source = context.get_parameter_source("folder")
    if folder.exists() or (source is not None and source.name == "COMMANDLINE"):
        _refuse_missing(folder)
    listing = Listing.read(folder, query)
    now = datetime.now(UTC)
    if as_json:
        print_document(runs_document(listing, now))
    else:
        print_listing(Page(sys.stdout, is_terminal=sys.stdout.isatty()), listing, now)


def _refuse_missing(folder: Path) -> None:
    """A folder that was named here is a mistake if it is not there; the usual one is just not there yet."""
    from quorate.core.errors import RunError
    from quorate.storage.run_search import is_run

    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "not there"
        raise RunError(f"cannot list the runs in {folder}: it is {what}. Give the folder of run folders with --runs.")
    if is_run(folder):
        raise RunError(f"{folder} is a run, not a folder of runs: look at it with quorate show {folder}")
