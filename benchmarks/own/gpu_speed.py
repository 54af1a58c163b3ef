"""How fast a job on a GPU is in steady state, and how busy it keeps the GPU, by its own events."""

import contextlib
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.blocks import Blocks
from benchmarks.own.gpu_job import GpuRun
from benchmarks.raw_images import sharded
from benchmarks.step_events import read_steps, step_times
from benchmarks.told import answer, read_order, reading

_SMI = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=100"]


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    keep, job = Path(order["keep"]), order["job"]
    keep.mkdir(parents=True, exist_ok=True)
    if order.get("images"):
        job = sharded(job, keep, order["images"])
    run = GpuRun(order, job)
    began = time.time()
    with watched_gpu(order.get("is_watched", False)) as samples:
        run.complete()
    blocks = Blocks(order["warm_up"], order["steps"])
    steps = read_steps(run.folder / "events.jsonl")
    times = step_times(steps, blocks)
    details = times.details | {"samples_per_second": 1000 * job["batch_size"] / times.mean_ms}
    details |= {"first_step_s": steps[min(steps)].time - began, **run.compiling()}
    since, until = steps[blocks.warm_up].time, steps[blocks.total].time
    busy = [percent for moment, percent in samples if since < moment <= until]
    if busy:
        details |= {"busy_percent": statistics.mean(busy), "busy_samples": float(len(busy))}
    answer(reading(order["case"], 1, times.ms, details=details))
    run.remove()


@contextlib.contextmanager
def watched_gpu(is_wanted: bool) -> Iterator[list[tuple[float, float]]]:
    """Moments, and the percentage of the time just before each in which the first GPU had something to compute."""
    samples: list[tuple[float, float]] = []
    if not is_wanted or shutil.which(_SMI[0]) is None:
        yield samples
        return
    watcher: subprocess.Popen[str] = subprocess.Popen(_SMI, stdout=subprocess.PIPE, text=True)

    def note() -> None:
        assert watcher.stdout is not None
        for line in watcher.stdout:
            with contextlib.suppress(ValueError):  # of several GPUs, and of one that does not tell
                samples.append((time.time(), float(line)))

    thread = threading.Thread(target=note, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        watcher.terminate()
        watcher.wait()
        thread.join()


if __name__ == "__main__":
    main()
