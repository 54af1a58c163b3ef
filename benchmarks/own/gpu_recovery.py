"""Kills one of two workers that share a GPU, and learns when the other completed its next step."""

import os
import random
import signal
import statistics
import time
from functools import partial
from itertools import pairwise

from benchmarks.own.gpu_job import PATIENCE, GpuRun
from benchmarks.own.watched_run import await_sight
from benchmarks.told import answer, read_order, reading
from quorate.observe.events import GenerationFormed, StepCompleted

STEADY = 5
"""Steps of all workers together before the next one is killed."""


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    workers = order["workers"]
    run = GpuRun(order, order["job"] | {"workers": workers})
    with run.started() as process:
        kills = []
        for _ in range(order["kills"]):
            await_sight("all workers train", lambda: run.is_steady(workers, STEADY), process, PATIENCE)
            time.sleep(random.uniform(0, 0.1))  # anywhere in a step
            kills.append(time.time())
            os.kill(run.pids()[random.choice(run.members())], signal.SIGKILL)
            await_sight("it is replaced", partial(run.is_steady, workers, 1, kills[-1]), process, PATIENCE)
    measured = [Recovery.after(run, killed, workers) for killed in kills]
    ms = [each.next_ms for each in measured]
    beyond = [max(0.0, each.next_ms - each.redo_ms) for each in measured]
    details = {
        "redo_ms": statistics.median(each.redo_ms for each in measured),
        "back_ms": statistics.median(each.back_ms for each in measured),
        "beyond_redo_ms": statistics.median(beyond),
        "worst_beyond_redo_ms": max(beyond),
    }
    answer(reading(order["case"], workers, ms, details=details))
    run.remove()


class Recovery:
    """Milliseconds from a kill to the next step and to the replacement, and those of a step of the survivors."""

    def __init__(self, next_ms: float, redo_ms: float, back_ms: float) -> None:
        self.next_ms, self.redo_ms, self.back_ms = next_ms, redo_ms, back_ms

    @classmethod
    def after(cls, run: GpuRun, killed: float, workers: int) -> "Recovery":
        events = [event for event in run.events() if event.time > killed]
        formed = [event for event in events if isinstance(event, GenerationFormed)]
        whole = next(event.time for event in formed if len(event.workers) == workers)
        steps = [event.time for event in events if isinstance(event, StepCompleted) and event.time > formed[0].time]
        alone = [later - earlier for earlier, later in pairwise(steps) if later < whole]
        # Where the replacement was too quick for two steps in between: those of all of them.
        usual = alone or [later - earlier for earlier, later in pairwise(steps)]
        return cls((steps[0] - killed) * 1000, statistics.median(usual) * 1000, (whole - killed) * 1000)


if __name__ == "__main__":
    main()
