"""The stopwatch of the changes benchmark: resizes a job, asks its workers to leave, and learns what the others paid."""

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.changes import SIGTERM, USUAL, Pause, resize_case
from benchmarks.own.watched_run import WatchedRun, await_sight
from benchmarks.told import answer, read_order, reading
from quorate.api.control import resize
from quorate.observe.events import WorkerLost
from quorate.storage.run_folder import RunFolder

STEADY = 2 * USUAL
"""Steps in a generation before the next change: the usual ones, and as many for what still comes about."""


@dataclass(frozen=True)
class Change:
    """What was changed, how many workers there are then, and the moments between which it came about."""

    case: str
    workers: int
    began: float
    ended: float


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    run = WatchedRun(order["folder"], _job(order))
    process = subprocess.Popen(run.command(), stdout=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        changes = list(_changes(run, process, order["sizes"]))
    finally:
        process.terminate()
        process.wait()
    cases = dict.fromkeys(change.case for change in changes)
    answer(*(_reading(run, [change for change in changes if change.case == case]) for case in cases))


def _job(order: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "changes",
        "task": "benchmarks.tasks:PausingTask",
        "params": {"case": "tiny-mlp", "samples": 32 * order["lanes"], "pause_s": order["step_ms"] / 1000},
        "lanes": order["lanes"],
        "workers": order["sizes"][0],
        "batch_size": 32 * order["lanes"],
        "steps": 1_000_000,
    }


def _changes(run: WatchedRun, process: subprocess.Popen[bytes], sizes: Sequence[int]) -> Iterator[Change]:
    workers = sizes[0]
    _await_steady(run, process, workers)
    for wanted in sizes[1:]:
        began = time.time()
        resize(RunFolder(run.runs / run.name), wanted)
        _await_steady(run, process, wanted, began)
        yield Change(resize_case(workers, wanted), wanted, began, time.time())
        workers = wanted
    for member in run.members():
        began = time.time()
        os.kill(run.pids()[member], signal.SIGTERM)
        _await_steady(run, process, workers, began)
        yield Change(SIGTERM, workers, began, time.time())


def _await_steady(run: WatchedRun, process: subprocess.Popen[bytes], workers: int, since: float = 0.0) -> None:
    what = f"{workers} worker{'s' if workers > 1 else ''} train{'s' if workers == 1 else ''} steadily"
    await_sight(what, lambda: run.is_steady(workers, STEADY, since), process)


def _reading(run: WatchedRun, changes: Sequence[Change]) -> dict[str, Any]:
    """One kind of change, however often it was made."""
    moments = run.step_times()
    pauses = [Pause.around(moments, change.began, change.ended) for change in changes]
    details = {
        "longest_ms": statistics.median(pause.longest for pause in pauses),
        "before_ms": statistics.median(pause.before for pause in pauses),
        "after_ms": statistics.median(pause.after for pause in pauses),
        "worst_ms": max(pause.beyond for pause in pauses),
        "lost_workers": sum(_losses(run, change) for change in changes),
    }
    return reading(changes[0].case, changes[0].workers, [pause.beyond for pause in pauses], details=details)


def _losses(run: WatchedRun, change: Change) -> int:
    """Workers that were taken for lost meanwhile: whoever leaves on request is not."""
    return sum(isinstance(event, WorkerLost) and change.began <= event.time < change.ended for event in run.events())


if __name__ == "__main__":
    main()
