"""A model that is trained after it was planned: how near the memory that it takes is to what the plan said."""

import contextlib
import itertools
import json
import subprocess
import sys

from benchmarks.own.gpu_job import GpuRun
from benchmarks.step_events import read_steps
from benchmarks.told import answer, read_order, reading


def main() -> None:
    """Answer the launcher: milliseconds of each step, and both amounts of memory."""
    order = read_order()
    run = GpuRun(order, order["job"])
    run.command()  # it writes the job's file
    told = subprocess.run(
        [sys.executable, "-m", "quorate", "plan", str(run.job_file), "--json"],
        stdout=subprocess.PIPE,
        env=run.environment(),
        check=True,
    )
    planned = json.loads(told.stdout)["memory"]["bytes"]
    run.complete()
    steps = list(read_steps(run.folder / "events.jsonl").values())
    details = {"planned_gb": planned / 1e9}
    with contextlib.suppress(KeyError):  # a CPU does not tell
        used = run.result()["device_memory"]["allocated_bytes"]
        details |= {"used_gb": used / 1e9, "off_plan_percent": 100 * abs(used / planned - 1)}
    gaps = [1000 * (later.time - earlier.time) for earlier, later in itertools.pairwise(steps)]
    answer(reading(order["case"], 1, gaps, details=details))
    run.remove()


if __name__ == "__main__":
    main()
