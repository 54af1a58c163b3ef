"""The verbs that read runs: `quorate runs`, `show`, `logs`, `report`, `diff` and `trace`."""

import os
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quorate.cli.options import RUNS, Address, Json, Run, Runs, TrustJob, choose, find_run, run_names, to_file
from quorate.cli.output import NONE, print_answer, print_document, print_growing_document
from quorate.core.errors import RequestError, RunError
from quorate.core.generation import cell_of, names_of
from quorate.core.runs_folder import is_run, is_search, searches_in
from quorate.observe.quantities import duration, size, visible
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder, refuse_untrusted, why_untrusted

if TYPE_CHECKING:  # pydantic and rich, which a help text does without
    from quorate.cli.layout import Page
    from quorate.history.logs import Filter, LogRecord
    from quorate.history.traces import Trace, WorkerTime
    from quorate.tune.folder import SearchFolder

LONGEST_MESSAGE = 10_000
"""Characters of a log message that are shown; `--json` has all."""
PROCESS_WIDTH = 17
LEVEL_STYLES = {"warning": "33", "error": "31", "critical": "1;31", "debug": "2"}
NEWEST_TRACES = 20
REST = "rest"


class Severity(StrEnum):
    """From what level on."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def runs(
    context: typer.Context,
    folder: Runs = RUNS,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="Only runs with this status: running, submitted, failed, lost, damaged, interrupted, terminated or "
            "complete. Repeatable."
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="Only runs of this task: its class, its file, or both.")] = "",
    name: Annotated[str, typer.Option(metavar="PREFIX", help="Only runs whose name begins with this.")] = "",
    sort: Annotated[str, typer.Option(help="Sort by age, name, status, steps or metric.")] = "age",
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="List at most this many runs.")] = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first, with status, progress and best metric; and searches below them.

    A run is lost if it was killed together with its launcher, and damaged if its files cannot be read. The trials of a
    search are runs in the folder of the search: --runs SEARCH/trials lists them.

    \b
    Examples:
      quorate runs --status failed --status lost
      quorate runs --sort metric --limit 5
    """
    from quorate.cli.runs_view import list_runs
    from quorate.history.run_record import Order, RunQuery, Status

    query = RunQuery(
        statuses=tuple(choose(word, Status, "--status") for word in status or ()),
        task=task,
        name=name,
        order=choose(sort, Order, "--sort"),
        reverse=reverse,
        limit=limit,
    )
    source = context.get_parameter_source("folder")
    # A folder that was named here is a mistake if it is not there; the usual one is just not there yet.
    is_named = source is not None and source.name == "COMMANDLINE"
    if not folder.is_dir() and (is_named or folder.exists()):
        what = "a file, not a folder" if folder.exists() else "not there"
        raise RunError(
            f"cannot list the runs in {folder.absolute()}: it is {what}. Give the folder of run folders with --runs."
        )
    if is_run(folder):
        raise RunError(f"{folder} is a run, not a folder of runs: look at it with quorate show {folder}")
    if is_search(folder):
        raise RunError(f"{folder} is a search: quorate show {folder} shows it; its runs are in {folder / 'trials'}")
    list_runs(folder, query, as_json)


def show(
    run: Run,
    with_ledger: Annotated[
        bool,
        typer.Option("--ledger", help="Check that every sample was used exactly once per epoch; exit code 1 if not."),
    ] = False,
    with_data: Annotated[
        bool,
        typer.Option(
            "--data", help="Show which shards of the training set each lane reads, and how much is read and left."
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="First show the progress of a running job until it has ended, as train does."
        ),
    ] = False,
    output: Annotated[Path | None, to_file("Draw the learning curves into this file, .svg or .png.")] = None,
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show everything about a run or a search: status, curves, checkpoints, its job, and what to type next.

    Every key of the job is shown with its value, where the value came from, and whether it affects results. --ledger
    and --data show the use of the samples instead, by epoch or by lane.

    RUN may also be the name of a search: then its trials are shown, and which one is the best.

    \b
    Examples:
      quorate show last
      quorate show last --ledger
      quorate show last --data
      quorate show last --follow
      quorate show last -o curves.png
      quorate show digits-0001 --json
    """
    from quorate.cli.run_view import draw_curves, follow_run, show_run

    if (search := _search_meant(runs, run)) is not None:
        from quorate.cli.search_view import show_search

        if with_ledger or with_data or follow or output:
            raise RequestError(
                f"{run} is a search; --ledger, --data, --follow and --output are about a run: one of those in "
                f"{search.trials}."
            )
        show_search(search, as_json)
        return
    folder = find_run(runs, run, address)
    if follow:
        if as_json:
            raise RequestError("--follow shows a run while it trains, and --json is one document: give one of them.")
        follow_run(folder)
    samples: dict[str, Any] = {}
    code = 0
    if with_data or with_ledger:
        from quorate.cli.samples_view import show_samples

        samples, code = show_samples(folder, with_data, with_ledger, as_json)
        if not as_json:
            raise typer.Exit(code)
    if output is not None:
        samples |= draw_curves(folder, output, as_json)
        if not as_json:
            return
    show_run(folder, samples, as_json)
    raise typer.Exit(code)


def logs(
    run: Run,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep showing new lines until the job has ended.")
    ] = False,
    worker: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only lines of this worker.")] = None,
    level: Annotated[str, typer.Option(help="The lowest level to show: debug, info, warning or error.")] = "",
    grep: Annotated[
        str, typer.Option(metavar="TEXT", help="Only lines that contain this text; upper and lower case are the same.")
    ] = "",
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show what all processes of a run have logged and printed, in the order of time.

    Lines that the task prints have the level info and the name of the worker. Secrets are masked. With --json each
    record has all its fields: time, level, logger, process, pid, worker, generation and step.

    \b
    Examples:
      quorate logs last
      quorate logs last -f --worker 1
      quorate logs digits-0001 --level warning
      quorate logs last --grep "out of memory" --json
    """
    from quorate.history.logs import Filter
    from quorate.storage.run_notes import failed_submission, waits_to_begin

    wanted = Filter(worker, choose(level, Severity, "--level") if level else "", grep)
    folder = find_run(runs, run, address)
    if waits_to_begin(folder) or failed_submission(folder):
        from quorate.engines.ray.jobs import await_begin, refuse_ended

        refuse_ended(folder)
        if follow:
            await_begin(folder)
    _show_logs(folder, wanted, follow, as_json)


def _show_logs(folder: RunFolder, wanted: "Filter", follow: bool, as_json: bool) -> None:
    from quorate.core.masking import mask_all
    from quorate.history.logs import RunLogs

    logged = sorted({int(path.name.split(".")[0].partition("-")[2]) for path in folder.logs.glob("worker-*.*")})
    if not follow and logged and wanted.worker not in (None, *logged):
        raise RunError(f"run {folder.name} has no worker {wanted.worker}: it has logs of {names_of(logged, ' and ')}")
    found = RunLogs(folder)
    records = found.follow(lambda: folder.holder() is not None) if follow else found.new()
    fitting = (record for record in records if wanted.takes(record))
    if as_json:
        print_growing_document({"run": folder.name}, "records", (mask_all(dict(each.fields)) for each in fitting))
        return
    colour = os.environ.get("FORCE_COLOR", "") not in ("", "0") or (
        sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    for record in fitting:
        print(line_of(record, colour=colour), flush=follow)


def line_of(record: "LogRecord", *, colour: bool) -> str:
    """A record for people: a line, and below it the traceback, if it has one."""
    try:
        moment = datetime.fromtimestamp(record.time).strftime("%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):  # no time that there could be: somebody has edited the log
        moment = "?" * 18
    source = record.fields.get("source")
    level = "" if source else record.level
    message = _plain(record.message.rstrip("\n")).replace("\n", "\n    ")
    head, style = f"{moment}  {record.process:<{PROCESS_WIDTH}} {level:<7}", LEVEL_STYLES.get(record.level, "")
    below = "".join(f"\n    {line}" for line in _plain(record.exception).splitlines())
    if not colour:
        return f"{head}  {message}{below}"
    text = f"\x1b[{style}m{message}\x1b[0m" if style else message
    return f"\x1b[2m{head}\x1b[0m  {text}{below}"


def _plain(text: str) -> str:
    """Masked once more, for logs that were written elsewhere; nothing in it moves the cursor or rings a bell."""
    from quorate.core.masking import mask

    masked = mask(text)
    cut = f"{masked[:LONGEST_MESSAGE]} … ({len(masked):,} characters)" if len(masked) > LONGEST_MESSAGE else masked
    return visible(cut)


def report(
    run: Run,
    output: Annotated[Path | None, to_file("The file to write. By default RUN.html in this folder.")] = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Write a report of a run or a search as one HTML page: curves, where the time goes, recoveries, its job.

    The page is self-contained: it can be opened from disk, sent and printed. The report of a running job shows its
    present state. The report of a search shows all its trials, and is Markdown if FILE ends in .md.

    \b
    Examples:
      quorate report last
      quorate report digits-0001 -o digits.html
      quorate report digits-search-0001 -o search.md
    """
    if (search := _search_meant(runs, run)) is not None:
        from quorate.cli.search_view import search_report

        name, page = search.name, search_report(search, as_markdown=output is not None and output.suffix == ".md")
    else:
        from quorate.cli.run_view import run_report

        folder = RunFolder.find(runs, run)
        name, page = folder.name, run_report(folder)
    file = Path(f"{name}.html") if output is None else output
    try:
        write_atomically(file, page)
    except OSError as error:
        raise RunError(
            f"cannot write the report to {file}: {error.strerror or error}. Name a file that can be written with -o."
        ) from None
    fields = {"run": name, "file": str(file.absolute()), "bytes": len(page)}
    print_answer(as_json, fields, f"{file}: {size(len(page))}")


def diff(
    run: Run,
    other: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.", autocompletion=run_names)],
    tensor: Annotated[
        bool, typer.Option("--tensor", help="Replay the step at which they diverge, and name the tensors that differ.")
    ] = False,
    trust_job: TrustJob = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Compare two runs: their keys, their metrics, and the first step at which they diverge.

    Two runs diverge at the first step whose loss or gradient norm differs in any bit, or a lane's gradient if both have
    recorded these (`record`). With --tensor both are trained again from the checkpoint before that step, in a temporary
    folder.

    \b
    Examples:
      quorate diff digits-0001 digits-0002
      quorate diff digits-0001 last --tensor
    """
    from quorate.cli.difference_view import show_difference

    left, right = RunFolder.find(runs, run), RunFolder.find(runs, other)
    if tensor and not trust_job:
        for reference, folder in ((run, left), (other, right)):
            why = why_untrusted(runs, reference, folder.path)
            refuse_untrusted(why, folder.path, "the task that its job names is not loaded to replay it")
    show_difference(left, right, tensor, as_json)


def trace(
    run: Run,
    step: Annotated[int | None, typer.Option("--step", min=1, metavar="K", help="Only this step.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Only the newest step that was traced.")] = False,
    output: Annotated[
        Path | None,
        to_file("Write the traces to this file in Chrome's format, for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show where the time of traced steps went, worker by worker, or export the traces for Chrome or Perfetto.

    A job traces its steps with `track: {trace: {every: 100}}`. Without --step and --last the newest 20 are shown.

    \b
    Examples:
      quorate trace last
      quorate trace last --last -o step.json
      quorate trace digits-0001 --step 200 -o step.json
    """
    if step is not None and last:
        raise RequestError("--step and --last name different steps; give one of them.")
    _show_traces(RunFolder.find(runs, run), step, last, output, as_json)


def _show_traces(run: RunFolder, step: int | None, last: bool, chrome: Path | None, as_json: bool) -> None:
    from quorate.cli.layout import Page
    from quorate.history.documents import trace_document
    from quorate.history.traces import traces_in, write_chrome_trace

    traces = traces_in(run, step, 1 if last else NEWEST_TRACES if step is None else None)
    if not traces:
        raise RunError(_no_trace(run, step, sorted({trace.step for trace in traces_in(run)})))
    if chrome is not None:
        try:
            write_chrome_trace(chrome, traces)
        except OSError as error:
            raise RequestError(f"cannot write {chrome}: {error.strerror}. Name another file with -o.") from None
    if as_json:
        print_document(trace_document(run.name, traces, None if chrome is None else str(chrome)))
        return
    page = Page()
    for number, trace in enumerate(traces):
        if number:
            page.line("")
        _print_trace(trace, page)
    if chrome is not None:
        page.line("")
        page.line(f"{chrome} is written: open it at ui.perfetto.dev, or in Chrome at chrome://tracing.")


def _print_trace(trace: "Trace", page: "Page") -> None:
    """A table of a step: workers below each other, phases side by side."""
    from rich.text import Text

    from quorate.cli.layout import headed_table

    workers = trace.workers
    page.title(Text(f"step {trace.step:,} of generation {trace.generation}, trace {trace.id}", "bold"))
    for span in trace.recovery:
        cause = f": {span.attributes['cause']}" if span.attributes.get("cause") else ""
        page.line(f"  {span.name} {duration(span.seconds)}{cause}")
    phases = list(dict.fromkeys(phase for worker in workers for phase in worker.phases))
    rows = [
        [cell_of(worker.worker), _milliseconds(worker.seconds), *_cells(worker, phases), _clock(worker)]
        for worker in workers
    ]
    if rows:
        page.table(headed_table(["worker", "step", *phases, REST, "clock"], rows=rows), indent=2)


def _cells(worker: "WorkerTime", phases: list[str]) -> list[str]:
    def cell(seconds: float) -> str:
        share = 100 * seconds / worker.seconds if worker.seconds > 0 else 0.0
        return f"{_milliseconds(seconds)} {share:.0f} %"

    return [*(cell(worker.phases[phase]) if phase in worker.phases else NONE for phase in phases), cell(worker.rest)]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms"


def _clock(worker: "WorkerTime") -> str:
    """How far the worker's own clock is behind the coordinator's."""
    if worker.clock_offset is None or worker.clock_uncertainty is None:
        return NONE
    return f"{1000 * worker.clock_offset:+.1f} ± {1000 * worker.clock_uncertainty:.1f} ms"


def _no_trace(run: RunFolder, step: int | None, traced: list[int]) -> str:
    if not traced or step is None:
        return (
            f"run {run.name} has no traces. A job traces one step in a hundred with `track: {{trace: {{every: 100}}}}` "
            "in its file, or with --set track.trace.every=100."
        )
    nearest = min(traced, key=lambda each: abs(each - step))
    return f"step {step:,} of run {run.name} was not traced; the nearest of {len(traced):,} that were is {nearest:,}."


def _search_meant(runs: Path, reference: str) -> "SearchFolder | None":
    """The search that is meant where a run may be meant as well; None where it is a run, or nothing at all."""
    if not searches_in(runs) and not is_search(Path(reference).expanduser()):
        return None
    from quorate.tune.folder import SearchFolder

    return SearchFolder.meant(runs, reference)
