"""The verbs that read runs: `quorate runs`, `quorate show` and `quorate diff`."""

import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.options import RUNS, Json, Run, Runs, choose, run_names
from quorate.cli.output import print_document


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
    """List runs, the newest first, with status, progress and best metric.

    A run is lost if it was killed together with its launcher, and damaged if its files cannot be read.

    Examples:

      quorate runs --status failed --status lost

      quorate runs --sort metric --limit 5
    """
    from quorate.cli.layout import Page
    from quorate.cli.runs_view import print_listing
    from quorate.history.documents import runs_document
    from quorate.history.run_record import Listing, Order, RunQuery, Status

    query = RunQuery(
        statuses=tuple(choose(word, Status, "--status") for word in status or ()),
        task=task,
        name=name,
        order=choose(sort, Order, "--sort"),
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
        print_listing(Page.on_stdout(), listing, now)


def show(
    run: Run,
    with_ledger: Annotated[
        bool,
        typer.Option("--ledger", help="Check that every sample was used exactly once an epoch; exit code 1 if not."),
    ] = False,
    with_data: Annotated[
        bool,
        typer.Option("--data", help="Show which lane reads which shards of the data, and how much is done and left."),
    ] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show everything about a run: status, curves, checkpoints, its job, and what to type next.

    Every value of the job is shown with where it came from, and whether it changes the bits. With --ledger the samples
    that its steps have used are added up instead, epoch by epoch, and with --data it shows how far each lane is in the
    shards of the training set.

    Examples:

      quorate show last

      quorate show last --ledger

      quorate show last --data

      quorate show digits-0001 --json
    """
    from quorate.cli.layout import Page
    from quorate.cli.run_view import print_run
    from quorate.history.documents import detail_document
    from quorate.history.run_detail import RunDetail, advise
    from quorate.storage.run_folder import RunFolder

    folder = RunFolder.find(runs, run)
    if with_data or with_ledger:
        samples, code = _samples_of(folder, with_data, with_ledger, as_json)
        if not as_json:
            raise typer.Exit(code)
    else:
        samples, code = {}, 0
    detail = RunDetail.read(folder)
    spec = None if detail.job is None else detail.job.spec
    advice = advise(detail.record, spec, detail.checkpoints, as_typed(detail.record.path))
    now = datetime.now(UTC)
    if not as_json:
        print_run(Page.on_stdout(), detail, advice, now)
        return
    print_document(detail_document(detail, advice, now) | samples)
    raise typer.Exit(code)


def _samples_of(folder: Any, with_data: bool, with_ledger: bool, as_json: bool) -> tuple[dict[str, Any], int]:
    """What a run has done with its samples: printed, or as parts of its document; and the exit code."""
    from quorate.cli.layout import Page
    from quorate.cli.samples_view import print_data, print_ledger
    from quorate.history.ledger import read_ledger
    from quorate.history.streaming import read_data_progress

    document: dict[str, Any] = {}
    code = 0
    if with_data:
        progress = read_data_progress(folder)
        document["data"] = progress.document()
        if not as_json:
            print_data(Page.on_stdout(), folder.name, progress)
    if with_ledger:
        ledger = read_ledger(folder)
        document["ledger"] = ledger.document()
        code = 0 if ledger.is_whole else 1
        if not as_json:
            print_ledger(Page.on_stdout(), folder.name, ledger)
    return document, code


def diff(
    run: Run,
    other: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.", autocompletion=run_names)],
    tensor: Annotated[
        bool, typer.Option("--tensor", help="Replay the step at which they part, and name the tensors that differ.")
    ] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Compare two runs: their keys, their metrics, and the first step at which they part.

    Two runs part where loss or gradient norm differ in any bit. With --tensor both are trained again, from the
    checkpoint before that step, in a folder that is thrown away.

    \b
    Examples:
      quorate diff digits-0001 digits-0002
      quorate diff digits-0001 last --tensor
    """
    from quorate.cli.difference_view import print_difference
    from quorate.history.difference import RunPair
    from quorate.history.documents import difference_document
    from quorate.storage.run_folder import RunFolder

    pair = RunPair.read(RunFolder.find(runs, run), RunFolder.find(runs, other))
    replayed = None
    if tensor and pair.comparison.parting is not None:
        from quorate.api.replay import replay

        parting = pair.comparison.parting
        reported = tuple({name: values[side] for name, values in parting.values.items()} for side in (0, 1))
        replayed = replay((pair.left.folder, pair.right.folder), parting.step, (reported[0], reported[1]))
    if as_json:
        print_document(difference_document(pair) | {"replay": None if replayed is None else asdict(replayed)})
    else:
        print_difference(pair, replayed, sys.stdout, is_terminal=sys.stdout.isatty())


def as_typed(path: Path) -> str:
    """A run as it is named on a command line that is typed here: by its name where that is enough."""
    from quorate.storage.run_folder import runs_folder

    is_usual = path.parent.absolute() == runs_folder().absolute()
    return shlex.quote(path.name if is_usual else str(path))


def _refuse_missing(folder: Path) -> None:
    """A folder that was named here is a mistake if it is not there; the usual one is just not there yet."""
    from quorate.core.errors import RunError
    from quorate.storage.run_folder import is_run

    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "not there"
        raise RunError(f"cannot list the runs in {folder}: it is {what}. Give the folder of run folders with --runs.")
    if is_run(folder):
        raise RunError(f"{folder} is a run, not a folder of runs: look at it with quorate show {folder}")
