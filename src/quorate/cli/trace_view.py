"""Where the time of traced steps went, for people, or as a file to look at."""

from pathlib import Path

from rich.text import Text

from quorate.cli.layout import NONE, Page, headed_table
from quorate.cli.output import print_document
from quorate.core.errors import RequestError, RunError
from quorate.core.generation import cell_of
from quorate.history.chrome_trace import write_chrome_trace
from quorate.history.documents import trace_document
from quorate.history.traces import Trace, WorkerTime, traces_in
from quorate.observe.quantities import duration
from quorate.storage.run_folder import RunFolder

NEWEST = 20
REST = "rest"


def show_traces(run: RunFolder, step: int | None, last: bool, chrome: Path | None, as_json: bool) -> None:
    """Print the traces of a run, and write them to a file if one is named. Raises RunError where there are none."""
    traces = traces_in(run, step, 1 if last else NEWEST if step is None else None)
    if not traces:
        raise RunError(_nothing(run, step))
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
        print_trace(trace, page)
    if chrome is not None:
        page.line("")
        page.line(f"{chrome} is written: open it at ui.perfetto.dev, or in Chrome at chrome://tracing.")


def print_trace(trace: Trace, page: Page) -> None:
    """A table of a step: workers below each other, phases side by side."""
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


def _cells(worker: WorkerTime, phases: list[str]) -> list[str]:
    def cell(seconds: float) -> str:
        share = 100 * seconds / worker.seconds if worker.seconds > 0 else 0.0
        return f"{_milliseconds(seconds)} {share:.0f} %"

    return [*(cell(worker.phases[phase]) if phase in worker.phases else NONE for phase in phases), cell(worker.rest)]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms"


def _clock(worker: WorkerTime) -> str:
    """How far the worker's own clock is behind the coordinator's."""
    if worker.clock_offset is None or worker.clock_uncertainty is None:
        return NONE
    return f"{1000 * worker.clock_offset:+.1f} ± {1000 * worker.clock_uncertainty:.1f} ms"


def _nothing(run: RunFolder, step: int | None) -> str:
    traced = sorted({trace.step for trace in traces_in(run)})
    if not traced:
        return (
            f"run {run.name} has no traces. A job traces one step in a hundred with `track: {{trace: {{every: 100}}}}` "
            "in its file, or with --set track.trace.every=100."
        )
    assert step is not None, "what there is would have been shown"
    nearest = min(traced, key=lambda each: abs(each - step))
    return f"step {step:,} of run {run.name} was not traced; the nearest of {len(traced):,} that were is {nearest:,}."
