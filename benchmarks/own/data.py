"""A job that reads shards, with steps that do next to nothing; or an example, whose steps tell what they wait for."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

from benchmarks.blocks import Blocks
from benchmarks.flow import counted, samples_per_second
from benchmarks.memory import MemoryWatch, peak_memory, resident_memory_of_family
from benchmarks.step_events import read_steps, step_times
from benchmarks.synthetic_shards import BATCH, provide
from benchmarks.told import answer, read_order, reading
from quorate.api.job import Job
from quorate.api.train import train
from quorate.observe.events import GenerationFormed, StepCompleted
from quorate.observe.jsonl import EventTail
from quorate.observe.waiting import DataWaitLog
from quorate.shards.index import NAME, load_index

TASK = "benchmarks.feed_task:FeedTask"
LANES = 8
SETTLED = 3
CALM_STEPS = 600
FEWEST_STEPS = 100
"""All of the data once, or more often if it is small."""
LOOK_EVERY = 0.25
"""Seconds between two looks at the memory: it is watched while the training is timed."""
MB = 10**6


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    with tempfile.TemporaryDirectory(dir=order["folder"]) as runs:
        answer(waiting_reading(order, Path(runs)) if "job" in order else _feed_reading(order, Path(runs)))


def indexed(order: dict[str, Any]) -> Path:
    """The shards that are asked for, with their index, which another process makes: it needs memory of its own."""
    place = provide(Path(order["folder"]), order["kind"], order["size"])
    if not (place / NAME).exists():
        command = [sys.executable, "-m", "quorate", "data", "index", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the shards could not be indexed: {done.stderr.strip()}")
    return place


def feed_job(kind: str, runs: Path, steps: int, place: str, loaders: int = 0, **keys: Any) -> Job:
    """So many steps with the defaults for everything that reading depends on. `place` is empty for data in memory."""
    batch = keys.pop("batch_size", BATCH[kind])
    return Job(
        task=TASK,
        name=f"bench-{kind}",
        params={"kind": kind, "place": place, **keys.pop("params", {})},
        runs=str(runs),
        steps=steps,
        lanes=LANES,
        workers=1,
        batch_size=batch,
        loader_workers=loaders,
        log_level="warning",
        **keys,
    )


def growth(samples: Sequence[tuple[float, int]]) -> int:
    """Bytes that the last third of a time takes more than the first, at most; what shrinks is no growth."""
    began, ended = samples[0][0], samples[-1][0]
    third = (ended - began) / 3
    first = max(taken for moment, taken in samples if moment <= began + third)
    last = max(taken for moment, taken in samples if moment >= ended - third)
    return max(0, last - first)


def _feed_reading(order: dict[str, Any], runs: Path) -> dict[str, Any]:
    kind, loaders, place = order["kind"], order["loaders"], indexed(order)
    calm = _calm_memory(order, runs / "calm")
    blocks = counted(max(FEWEST_STEPS, len(load_index(str(place))) // BATCH[kind]))
    watch = _watch()
    steps = _watched(feed_job(kind, runs / "shards", blocks.total, str(place), loaders), watch)
    times = step_times(steps, blocks)
    samples = _between(watch.samples, steps, SETTLED, blocks.total)
    details = {
        "samples_per_second": samples_per_second(BATCH[kind], times.ms),
        "memory_mb": max(0, max(taken for _, taken in samples) - calm) / MB,
        "growth_mb": growth(samples) / MB,
        **times.details,
    }
    return reading(order["case"], 1 + loaders, times.ms, size=order["size"], details=details)


def _calm_memory(order: dict[str, Any], runs: Path) -> int:
    """The most that the same job takes with a few samples in memory."""
    watch = _watch()
    steps = _watched(feed_job(order["kind"], runs, CALM_STEPS, "", order["loaders"]), watch)
    return peak_memory(watch.samples, float(steps[SETTLED]["time"]), float(steps[CALM_STEPS]["time"]))


def _watch() -> MemoryWatch:
    return MemoryWatch(over=lambda: False, clock=time, pause=LOOK_EVERY, measure=resident_memory_of_family)


def _watched(job: Job, watch: MemoryWatch) -> Any:
    watch.start()
    try:
        result = train(job, progress=False)
    finally:
        watch.stop()
    return read_steps(result.folder / "events.jsonl")


def _between(samples: Sequence[tuple[float, int]], steps: Any, first: int, last: int) -> list[tuple[float, int]]:
    began, ended = steps[first].time, steps[last].time
    found = [each for each in samples if began <= each[0] <= ended]
    if len(found) < 3:
        raise SystemExit("the training was over before its memory was looked at three times: give a larger --size")
    return found


def waiting_reading(order: dict[str, Any], runs: Path) -> dict[str, Any]:
    """An example as its job file has it, or the first steps of it: what a step waits for data."""
    job = Job.from_file(order["job"]).replace(runs=str(runs), log_level="warning")
    if order["data"] is not None:
        job = job.replace(params__data=order["data"])
    if order["steps"] is not None:
        job = job.replace(steps=order["steps"], evaluate__every="end")
    result = train(job, progress=False)
    log, waited = DataWaitLog(), list[float]()
    workers = 0
    for event in EventTail(result.folder / "events.jsonl"):
        before = log.wait.waited_s
        log.handle(event)
        workers = len(event.workers) if isinstance(event, GenerationFormed) else workers
        if isinstance(event, StepCompleted):
            waited.append((log.wait.waited_s - before) * 1000)
    blocks = Blocks(1, len(waited) - 1)
    times = step_times(read_steps(result.folder / "events.jsonl"), blocks)
    details = {"waiting_percent": log.wait.share * 100, **times.details}
    return reading(order["case"], workers, waited[1:], details=details)


if __name__ == "__main__":
    main()
