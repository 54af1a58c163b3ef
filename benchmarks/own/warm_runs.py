"""Runs one after another in one program: what those after the first cost beside their steps."""

import time
from statistics import median

import psutil

from benchmarks.own.jobs import TASK
from benchmarks.step_events import read_steps
from benchmarks.told import answer, read_order, reading
from quorate.api.job import Job
from quorate.api.train import train
from quorate.api.warm import warm

RUNS = 4
STEPS = 20


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    processes = order["processes"]
    job = Job(
        task=TASK,
        name="bench-warm",
        params={"case": "tiny-mlp", "samples": 64 * STEPS},
        lanes=processes,
        workers=processes,
        batch_size=32 * processes,
        steps=STEPS,
        runs=order["folder"],
    )
    with warm():
        _, *later = [_measured(job) for _ in range(RUNS)]
    first_ms, beyond_ms, cpu_ms = zip(*later, strict=True)
    details = {"beyond_ms": median(beyond_ms), "cpu_ms": median(cpu_ms)}
    answer(reading("tiny-mlp", processes, first_ms, details=details))


def _measured(job: Job) -> tuple[float, float, float]:
    """Milliseconds of a run: to its first step, beside its steps, and of processors."""
    began, used = time.time(), _cpu_seconds()
    result = train(job, progress=False)
    wall, used = time.time() - began, _cpu_seconds() - used
    moments = [event.time for _, event in sorted(read_steps(result.folder / "events.jsonl").items())]
    steps = (moments[-1] - moments[0]) * STEPS / (STEPS - 1)
    return (moments[0] - began) * 1000, (wall - steps) * 1000, used * 1000


def _cpu_seconds() -> float:
    """Of this process and of all that it has started: what has ended is counted with whoever has waited for it."""
    own = psutil.Process()
    return float(sum(sum(one.cpu_times()[:4]) for one in (own, *own.children())))


if __name__ == "__main__":
    main()
