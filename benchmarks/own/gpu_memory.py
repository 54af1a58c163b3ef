"""A batch that does not fit while half of it does: how soon the job goes on with `shrink`, and whether it repeats."""

import os
import signal
import subprocess
from typing import Any

from benchmarks.own.gpu_digests import digest_of
from benchmarks.own.gpu_job import GpuRun
from benchmarks.told import answer, read_order, reading
from quorate.observe.events import MemoryRanOut, RunBegan, StepCompleted

TRIES = 6
"""Batches that are tried, each twice or half as large as the one before."""
ENOUGH = 3
"""Steps after which a batch is known to fit."""


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    job = order["job"]
    batch = smallest_too_large(order)
    order["job"] = job | {"batch_size": batch, "on_out_of_memory": "shrink", "checkpoint": {"every": 2, "keep": 1}}
    plain = GpuRun(order, order["job"])
    plain.complete()
    events = plain.events()
    shortages = [event for event in events if isinstance(event, MemoryRanOut)]
    if not shortages:
        raise SystemExit(f"a batch of {batch} samples did fit in the end: memory never ran out")
    steps = [event for event in events if isinstance(event, StepCompleted)]
    if {event.samples for event in steps} != {batch}:
        raise SystemExit(f"steps were of {sorted({event.samples or 0 for event in steps})} samples, not of {batch}")
    first = next(event for event in steps if event.step == shortages[-1].step)
    began = max(
        event.time for event in events if event.time < first.time and isinstance(event, RunBegan | StepCompleted)
    )
    digests = {digest_of(plain), killed(order), resumed(order)}
    details = {
        "batch": float(batch),
        "redone": float(len(shortages)),
        "micro_batches": float(shortages[-1].micro_batches),
        "digests": float(len(digests)),
        "runs": 3.0,
    }
    answer(reading(order["case"], 1, [1000 * (first.time - began)], details=details))


def smallest_too_large(order: dict[str, Any]) -> int:
    """Half of it fits."""
    batch: int = order["begin"]
    fits = None
    for _ in range(TRIES):
        if fits_in(order, batch):
            fits, batch = batch, 2 * batch
        elif fits is not None or fits_in(order, batch // 2):
            return batch
        else:
            batch //= 2
    raise SystemExit(f"from {order['begin']} to {batch} samples there is no batch that is just too large")


def fits_in(order: dict[str, Any], batch: int) -> bool:
    """Whether a few steps of it need less memory than there is."""
    run = GpuRun(order, order["job"] | {"batch_size": batch, "steps": ENOUGH, "on_out_of_memory": "fail"})
    with run.started() as process:
        code = process.wait()
    if code and "memory" not in run.last_words():
        raise SystemExit(f"a batch of {batch} samples could not be tried: {run.last_words()}")
    run.remove()
    return code == 0


def killed(order: dict[str, Any]) -> str:
    """Its only worker, in the middle."""
    run = GpuRun(order, order["job"])
    with run.started() as process:
        await_middle(run, order, process)
        (pid,) = run.pids().values()
        os.kill(pid, signal.SIGKILL)
        run.await_end(process)
    if not run.result()["recoveries"]:
        raise SystemExit("the worker was killed too late: nothing had to recover")
    return digest_of(run)


def resumed(order: dict[str, Any]) -> str:
    """Stopped in the middle."""
    run = GpuRun(order, order["job"])
    with run.started() as process:
        await_middle(run, order, process)
        process.terminate()
        process.wait()
    run.complete(run.resume(1))
    return digest_of(run)


def await_middle(run: GpuRun, order: dict[str, Any], process: subprocess.Popen[bytes]) -> None:
    """After memory has run out, and before the end."""
    run.await_step(order["job"]["steps"] // 3, process)


if __name__ == "__main__":
    main()
