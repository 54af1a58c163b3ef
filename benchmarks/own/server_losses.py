"""Kills workers, servers and the coordinator of a job with parameter servers, and learns how long no step came."""

import itertools
import os
import random
import signal
import subprocess
import time
from typing import Any

from benchmarks.own.watched_run import WatchedRun, await_sight
from benchmarks.servers import COORDINATOR_KILLED, SERVER_KILLED, WORKER_KILLED
from benchmarks.told import answer, read_order, reading
from quorate.core.generation import FIRST_SERVER

STEADY = 5
"""Steps that all members complete together before the next one is killed."""


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    run = WatchedRun(order["folder"], _job(order))
    process = subprocess.Popen(run.command(), stdout=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    pauses: dict[str, list[float]] = {}
    try:
        for case in [WORKER_KILLED, SERVER_KILLED, COORDINATOR_KILLED] * order["kills"]:
            pauses.setdefault(case, []).append(_kill(run, process, case, order))
    finally:
        process.terminate()
        process.wait()
    answer(
        *(reading(case, order["processes"], found, details={"worst_ms": max(found)}) for case, found in pauses.items())
    )


def _job(order: dict[str, Any]) -> dict[str, Any]:
    workers = order["processes"]
    return {
        "name": "server-losses",
        "task": "benchmarks.tasks:PausingTask",
        "params": {"case": "tiny-mlp", "samples": 32 * workers, "pause_s": order["step_ms"] / 1000},
        "lanes": workers,
        "workers": workers,
        "batch_size": 32 * workers,
        "steps": 1_000_000,
        "strategy": {"kind": "parameter-server", "servers": order["servers"], "replicas": 2},
    }


def _kill(run: WatchedRun, process: subprocess.Popen[bytes], case: str, order: dict[str, Any]) -> float:
    """Milliseconds of the longest pause between two steps, from the kill until all are back."""
    members = (order["processes"], STEADY)
    await_sight("all members train", lambda: run.is_steady(*members, servers=order["servers"]), process)
    time.sleep(random.uniform(0, order["step_ms"] / 1000))
    victims = [pid for member, pid in run.pids().items() if (member >= FIRST_SERVER) == (case == SERVER_KILLED)]
    coordinator = run.coordinator()
    killed = time.time()
    if case != COORDINATOR_KILLED:
        os.kill(random.choice(victims), signal.SIGKILL)
        await_sight("all are back", lambda: run.is_steady(*members, killed, order["servers"]), process)
    elif coordinator is not None:
        os.kill(coordinator, signal.SIGKILL)
        await_sight("another coordinates", lambda: run.coordinator() != coordinator, process)
        back = time.time()
        await_sight("training continues", lambda: sum(t > back for t in run.step_times()) >= STEADY, process)
    moments = sorted(run.step_times())
    before = max(moment for moment in moments if moment <= killed)
    return 1000 * max(later - earlier for earlier, later in itertools.pairwise(moments) if earlier >= before)


if __name__ == "__main__":
    main()
