"""The stopwatch of the recovery benchmark: starts a command, kills one of its workers, and learns when it went on."""

import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.own.watched_run import WatchedRun, await_sight
from benchmarks.told import answer, read_order, reading
from quorate.observe.events import GenerationFormed, StepCompleted
from quorate.observe.recoveries import RecoveryLog

STEADY = 3
"""Steps that all workers complete together before the next one is killed."""


LONGEST = 600.0
"""Seconds within which it goes on, or never. Torchrun starts all processes anew, and again where they miss each other
meanwhile: on a busy machine that takes minutes."""


class Patient(Protocol):
    """A training that can be hurt. Moments are times of the clock on the wall."""

    def command(self) -> list[str]:
        """What is typed."""
        ...

    def victims(self) -> list[int]:
        """The processes of its workers, once all of them train; none before."""
        ...

    def went_on(self, killed: float) -> tuple[float, float | None] | None:
        """When it completed its first step without the victim, and when the victim was replaced, if it is known."""
        ...

    def step_times(self) -> list[float]:
        """When each step was completed."""
        ...

    def steps_lost(self) -> int | None:
        """How many completed steps were trained again after the kills, if it is known."""
        ...


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    patient = PATIENTS[order["system"]](order)
    process = subprocess.Popen(patient.command(), stdout=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        measured = [_kill_one(patient, process, order["step_ms"] / 1000) for _ in range(order["kills"])]
        await_sight("all workers train again", patient.victims, process)
    finally:
        process.terminate()
        process.wait()
    lanes = -(-order["processes"] // (order["processes"] - 1)) if order["system"] == "quorate" else 1
    details = {"redo_ms": lanes * float(order["step_ms"])}
    details["lost_ms"] = 1000 * lost_time(patient.step_times()) / order["kills"]
    if (lost := patient.steps_lost()) is not None:
        details["steps_lost"] = float(lost)
    back = [moment for _, moment in measured if moment is not None]
    if back:
        details["back_ms"] = statistics.median(back)
    answer(reading(f"{order['processes']} workers", order["processes"], [ms for ms, _ in measured], details=details))


def lost_time(moments: Sequence[float]) -> float:
    """Seconds in which nothing came about: what steps took longer than usual, where that is twice as long or more."""
    pauses = [later - earlier for earlier, later in itertools.pairwise(sorted(moments))]
    usual = statistics.median(pauses)
    return sum(pause - usual for pause in pauses if pause >= 2 * usual)


def _kill_one(patient: Patient, process: subprocess.Popen[bytes], step: float) -> tuple[float, float | None]:
    """Milliseconds from the kill to the next step, and to the replacement."""
    victims = await_sight("all workers train", patient.victims, process)
    time.sleep(random.uniform(0, step))
    killed = time.time()
    os.kill(random.choice(victims), signal.SIGKILL)
    step_ended, back = await_sight("the training continues", lambda: patient.went_on(killed), process, LONGEST)
    return (step_ended - killed) * 1000, None if back is None else (back - killed) * 1000


class Quorate:
    """A job of one lane for each worker, with loader processes, as a user starts it."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._workers = order["processes"]
        job = {
            "name": f"recovery-{self._workers}",
            "task": "benchmarks.tasks:PausingTask",
            "params": {"case": "tiny-mlp", "samples": 32 * self._workers, "pause_s": order["step_ms"] / 1000},
            "lanes": self._workers,
            "workers": self._workers,
            "batch_size": 32 * self._workers,
            "steps": 1_000_000,
            "loader_workers": 1,
        }
        if order["system"] == "quorate-ddp":
            job |= {"strategy": "ddp", "min_workers": self._workers}
        self._run = WatchedRun(order["folder"], job)

    def command(self) -> list[str]:
        """Quorate train."""
        return self._run.command()

    def victims(self) -> list[int]:
        """All workers, when the newest generation has all of them and a few steps behind it."""
        return list(self._run.pids().values()) if self._run.is_steady(self._workers, STEADY) else []

    def went_on(self, killed: float) -> tuple[float, float | None] | None:
        """By the run's own events."""
        events = [event for event in self._run.events() if event.time > killed]
        formed = [event for event in events if isinstance(event, GenerationFormed)]
        whole = [event.time for event in formed if len(event.workers) == self._workers]
        if not whole:
            return None
        steps = [event.time for event in events if isinstance(event, StepCompleted) and event.time > formed[0].time]
        return (min(steps), whole[0]) if steps else None

    def step_times(self) -> list[float]:
        """By the run's own events."""
        return self._run.step_times()

    def steps_lost(self) -> int | None:
        """As its summary counts them."""
        log = RecoveryLog()
        for event in self._run.events():
            log.handle(event)
        return sum(recovery.steps_lost for recovery in log.recoveries)


class Torchrun:
    """DistributedDataParallel over Gloo, restarted by torchrun from what it saved after its last step."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._workers = order["processes"]
        self._pause = order["step_ms"] / 1000
        # Of its own: it would go on from what an earlier round has saved, and count its starts anew.
        self._folder = Path(tempfile.mkdtemp(prefix=f"torchrun-{self._workers}-", dir=order["folder"]))

    def command(self) -> list[str]:
        """Torchrun, with more restarts than are needed."""
        processes = ["--standalone", "--nproc-per-node", str(self._workers), "--max-restarts", "100"]
        module = ["--module", "benchmarks.peers.torchrun_recovery", str(self._folder), str(self._pause)]
        return [sys.executable, "-m", "torch.distributed.run", *processes, *module]

    def victims(self) -> list[int]:
        """Those of the newest start, when it has a few steps behind it."""
        steps = self._steps()
        newest = max((start for start, _ in steps), default=-1)
        pids = [int(file.read_text()) for file in self._folder.glob(f"pid-{newest}-*")]
        return pids if sum(start == newest for start, _ in steps) >= STEADY else []

    def went_on(self, killed: float) -> tuple[float, float | None] | None:
        """The first step of the start after it."""
        newest = max((start for start, moment in self._steps() if moment <= killed), default=-1)
        moment = min((moment for start, moment in self._steps() if start > newest), default=None)
        return None if moment is None else (moment, moment)

    def step_times(self) -> list[float]:
        """As it has noted them."""
        return [moment for _, moment in self._steps()]

    def steps_lost(self) -> int | None:
        """It saves after every step, as nobody does who trains."""
        return None

    def _steps(self) -> list[tuple[int, float]]:
        file = self._folder / "steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(start), float(moment)) for start, moment in (line.split() for line in lines)]


PATIENTS: dict[str, Callable[[dict[str, Any]], Patient]] = {
    "quorate": Quorate,
    "quorate-ddp": Quorate,
    "torchrun": Torchrun,
}


if __name__ == "__main__":
    main()
