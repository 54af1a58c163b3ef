"""`quorate show`."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.document import print_document
from quorate.cli.options import RUNS, Json, Run, Runs

WithLedger = Annotated[
    bool, typer.Option("--ledger", help="Check that every sample was used exactly once an epoch; exit code 1 if not.")
]
WithData = Annotated[
    bool, typer.Option("--data", help="Tell which lane reads which shards of the data, and how much is done and left.")
]


def show(
    run: Run,
    with_ledger: WithLedger = False,
    with_data: WithData = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show everything about a run: how it stands, its curves, its checkpoints, its job, and what to type next.

    Every value of the job is told with where it came from, and whether it changes the bits. With --ledger the samples
    that its steps have used are added up instead, epoch by epoch, and with --data it tells how far each lane is in the
    shards of the training set.

    Examples:

      quorate show last

      quorate show last --ledger

      quorate show last --data

      quorate show digits-0001 --json
    """
    from quorate.cli.detail_document import detail_document
    from quorate.cli.page import Page
    from quorate.cli.run_page import print_run
    from quorate.history.run_detail import RunDetail, advise
    from quorate.storage.run_folder import RunFolder

    folder = RunFolder.find(runs, run)
    if with_data and not as_json:
        _show_data(folder.path)
    if with_ledger and not as_json:
        _show_ledger(folder.path)
    if (with_data or with_ledger) and not as_json:
        return
    detail = RunDetail.read(folder)
    spec = None if detail.job is None else detail.job.spec
    advice = advise(detail.record, spec, detail.checkpoints, as_typed(detail.record.path))
    now = datetime.now(UTC)
    if not as_json:
        print_run(Page(sys.stdout, is_terminal=sys.stdout.isatty()), detail, advice, now)
        return
    document = detail_document(detail, advice, now)
    if with_data:
        document |= {"data": _data_of(folder.path)}
    if with_ledger:
        _print_with_ledger(document, folder.path)
    else:
        print_document(document)


def _show_data(path: Path) -> None:
    from quorate.cli.data_view import print_data
    from quorate.cli.page import Page
    from quorate.history.streaming import read_data_progress
    from quorate.storage.run_folder import RunFolder

    progress = read_data_progress(RunFolder(path))
    print_data(Page(sys.stdout, is_terminal=sys.stdout.isatty()), path.name, progress)


def _data_of(path: Path) -> dict[str, Any]:
    from quorate.cli.data_view import data_document
    from quorate.history.streaming import read_data_progress
    from quorate.storage.run_folder import RunFolder

    return data_document(read_data_progress(RunFolder(path)))


def _show_ledger(path: Path) -> None:
    from quorate.cli.ledger_view import print_ledger
    from quorate.cli.page import Page
    from quorate.history.ledger import read_ledger
    from quorate.storage.run_folder import RunFolder

    ledger = read_ledger(RunFolder(path))
    print_ledger(Page(sys.stdout, is_terminal=sys.stdout.isatty()), path.name, ledger)
    raise typer.Exit(0 if ledger.is_whole else 1)


def _print_with_ledger(document: dict[str, Any], path: Path) -> None:
    from quorate.cli.ledger_view import ledger_document
    from quorate.history.ledger import read_ledger
    from quorate.storage.run_folder import RunFolder

    ledger = read_ledger(RunFolder(path))
    print_document(document | {"ledger": ledger_document(ledger)})
    raise typer.Exit(0 if ledger.is_whole else 1)


def as_typed(path: Path) -> str:
    """A run as it is named on a command line that is typed here: by its name where that is enough."""
    from quorate.storage.runs_folder import runs_folder

    is_usual = path.parent.absolute() == runs_folder().absolute()
    return shlex.quote(path.name if is_usual else str(path))
