"""A job of one worker that saves now and then, as `quorate train` does it; its own events tell what that costs."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time
from typing import Any

from benchmarks.cases import SIZED_BATCH
from benchmarks.memory import MemoryWatch, peak_memory
from benchmarks.saves import Save
from benchmarks.saving import BATCHES, FEWEST_STEPS, SETTLED, Trained, measure_training, total_steps
from benchmarks.told import answer, read_order
from quorate.api.job import Job
from quorate.api.train import train
from quorate.checkpoint.store import CheckpointFolder
from quorate.observe.event import Event
from quorate.observe.events import CheckpointSaved, StepCompleted
from quorate.observe.jsonl import EventTail

TASK = "benchmarks.tasks:SizedTask"


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    with tempfile.TemporaryDirectory(dir=order["folder"]) as temporary:
        runs = Path(temporary)
        readings = measure_training(
            order["size"], runs, lambda every: _train(order, runs, every), lambda: _last_save(runs)
        )
        answer(*readings)


def trained_of(events: Sequence[Event], samples: Sequence[tuple[float, int]], calm: int) -> Trained:
    """What the events of a run tell: a save begins with the end of its step, and is over when it is told.

    The save at the end of the run is left out, since no step follows that it could disturb. `calm` is the memory of
    the same job without saves: where saves are due, memory for them may be taken long before the first.
    """
    moments = step_moments(events)
    told = {event.step: event for event in events if isinstance(event, CheckpointSaved) and event.step is not None}
    saves = [
        Save(moments[step], event.time, event.seconds or 0.0, event.added_s)
        for step, event in sorted(told.items())
        if step + 1 in moments
    ]
    if not saves:
        raise SystemExit("the run has told no save in the middle of its training")
    peak = peak_memory(samples, moments[SETTLED], saves[0].ended)
    return Trained([moments[step] for step in sorted(moments)], saves, max(0, peak - calm))


def step_moments(events: Sequence[Event]) -> dict[int, float]:
    """When each step was complete."""
    steps = (event for event in events if isinstance(event, StepCompleted))
    return {event.step: event.time for event in steps if event.step is not None}


def _train(order: dict[str, Any], runs: Path, every: int) -> Trained:
    calm = _memory_without_saves(order, runs)
    job = _job(order, runs, total_steps(every, order["saves"]), every)
    watch = MemoryWatch(over=lambda: any(isinstance(event, CheckpointSaved) for event in _events(runs)), clock=time)
    _watched(job, watch)
    return trained_of(_events(runs), watch.samples, calm)


def _memory_without_saves(order: dict[str, Any], folder: Path) -> int:
    """The most that the same job takes between its first steps and the end, at which it saves."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        runs = Path(temporary)
        watch = MemoryWatch(over=lambda: False, clock=time)
        _watched(_job(order, runs, FEWEST_STEPS, None), watch)
        moments = step_moments(_events(runs))
    return peak_memory(watch.samples, moments[SETTLED], moments[FEWEST_STEPS - 2])


def _watched(job: Job, watch: MemoryWatch) -> None:
    watch.start()
    try:
        train(job, progress=False)
    finally:
        watch.stop()


def _job(order: dict[str, Any], runs: Path, steps: int, every: int | None) -> Job:
    return Job(
        task=TASK,
        name="bench-checkpoint",
        params={"state_bytes": order["size"], "samples": BATCHES * SIZED_BATCH},
        runs=str(runs),
        steps=steps,
        lanes=1,
        workers=1,
        batch_size=SIZED_BATCH,
        checkpoint={"every": every},
        log_level="warning",
    )


def _last_save(runs: Path) -> tuple[Path, Callable[[], object]]:
    """Verified and decoded, as a worker does when it goes on from there."""
    (folder,) = runs.glob("*/checkpoints")
    checkpoints = CheckpointFolder(folder)
    newest = checkpoints.list()[-1]
    return newest.path, lambda: checkpoints.load(newest)


def _events(runs: Path) -> list[Event]:
    return [event for file in runs.glob("*/events.jsonl") for event in EventTail(file)]


if __name__ == "__main__":
    main()
