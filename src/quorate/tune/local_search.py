"""A search on this machine: a process for each trial that runs at a time, ``python -m quorate.tune.local_search``."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from quorate.api.warm import WarmRunner
from quorate.core.errors import JobFileError, RequestError
from quorate.core.gpus import VISIBLE, gpus_here
from quorate.core.machine import usable_cores
from quorate.core.processes import describe_departure, die_with_parent, likely_cause, show_as
from quorate.spec.device import kind_of
from quorate.tune.driver import Driver
from quorate.tune.folder import SearchFolder
from quorate.tune.loading import ResolvedSearch
from quorate.tune.selection import Pruner
from quorate.tune.trial_run import GLANCE, Plan, Report, TrialRun, run_name
from quorate.tune.trials import ENDED


def demand_of(search: ResolvedSearch, on_gpu: bool) -> dict[str, float]:
    """What a trial takes: all of its workers, on one machine."""
    spec, job = search.spec.trial, search.job.spec
    assert isinstance(job.workers, int)
    cpu = spec.cpu if spec.cpu is not None else float(job.threads)
    gpu = spec.gpu if spec.gpu is not None else float(on_gpu)
    demand = {"CPU": job.workers * cpu, "GPU": job.workers * gpu}
    return {name: amount for name, amount in demand.items() if amount}


def refuse_too_large(name: str, amount: float, most: float, where: str, largest: str) -> None:
    """Refuse a trial that takes more than there is in any one place."""
    if amount > most:
        raise RequestError(
            f"trial: a trial takes {amount:g} {name} on {where} (workers × {name.lower()}), and {largest} "
            f"has {most:g}. Use fewer workers, or less for each."
        )


@contextmanager
def on_this_machine(
    search: ResolvedSearch,
    folder: SearchFolder,  # noqa: ARG001 (which a search on Ray needs)
) -> Iterator[Callable[[Driver, dict[str, Any]], None]]:
    """What has the trials trained here that the driver's source gives, with the keys of a job that say where and how
    they run."""
    places = places_here(search)
    yield lambda driver, manner: _Trials(search, driver, manner).run(places)


def places_here(search: ResolvedSearch) -> list[str]:
    """The GPUs that each of the trials at a time sees, as `CUDA_VISIBLE_DEVICES` names them.

    CPUs are slots: more trials than fit run if `concurrent` says so. GPUs are not.
    """
    gpus = gpus_here()
    demand = demand_of(search, kind_of(search.job.spec) == "cuda")
    count = search.spec.concurrent or max(1, int(usable_cores() / demand["CPU"]))
    each = demand.get("GPU", 0.0)
    refuse_too_large("GPU", each, len(gpus), "this machine", "it")
    if each:
        count = min(count, int(len(gpus) / each))
    shares = ((math.floor(place * each), math.ceil((place + 1) * each)) for place in range(count))
    return [",".join(gpus[first:last]) if each else "" for first, last in shares]


class _Trials:
    """The trials that are under way, in one place each, and how their driver hears of them."""

    def __init__(self, search: ResolvedSearch, driver: Driver, manner: dict[str, Any]) -> None:
        self._search = search
        self._driver = driver
        self._manner = manner
        self._pruner = Pruner(search.spec, driver.journal)
        self._told: dict[int, int] = {}

    def run(self, places: list[str]) -> None:
        """A process that is done with a trial gets the next one, with torch and the task imported already."""
        processes = [_TrialProcess(visible) for visible in places]
        try:
            while True:
                for process in processes:
                    while process.trial is None and self._driver.source.has_more:
                        self._begin(process)
                at_work = {each.connection: each for each in processes if each.trial is not None}
                if not at_work:
                    return
                for connection in wait(list(at_work), GLANCE):
                    self._hear(at_work[connection])
                self._driver.turn()
        finally:
            for process in processes:
                process.close()

    def _begin(self, process: "_TrialProcess") -> None:
        number, params = self._driver.source.next()
        try:
            job = self._search.trial_job(params, number, self._manner)
        except JobFileError as error:  # of values that Optuna has chosen
            self._end(number, error.message)
            return
        self._driver.began(number)
        plan = Plan(Path(self._manner["runs"]), run_name(number), job, after=self._told.get(number, 0))
        process.begin(number, plan)

    def _hear(self, process: "_TrialProcess") -> None:
        number = process.trial
        assert number is not None
        try:
            report: Report = process.connection.recv()
        except (EOFError, OSError):
            self._bury(process, number)
            return
        stopped = ""
        if not report.ending and self._driver.journal.trials[number].status not in ENDED:
            self._told[number] = report.step
            stopped = self._pruner.judge(number, report)
        self._driver.told(number, report, stopped=stopped)
        if stopped:
            process.stop()
        if report.ending:
            process.trial = None
            self._driver.source.ended(number)

    def _bury(self, process: "_TrialProcess", number: int) -> None:
        """Another process goes on with the trial of one that has died."""
        code = process.close()
        if why := self._driver.died(number):
            self._end(number, f"{why}: it {describe_departure(code)}.{likely_cause(code)}")
        else:
            self._driver.source.again(number)

    def _end(self, number: int, message: str) -> None:
        """A trial has failed without a process that could tell it."""
        self._driver.told(number, Report(self._told.get(number, 0), ending="failed", message=message))
        self._driver.source.ended(number)


class _TrialProcess:
    """A launcher that trains one trial after another, as its owner holds it. It ends with its owner."""

    def __init__(self, visible: str) -> None:
        self.trial: int | None = None
        self.connection: Any = None
        self._visible = visible
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, number: int, plan: Plan) -> None:
        self.trial = number
        if self._process is None:
            self._start()
        with suppress(OSError):  # it has died, which is heard
            self.connection.send(plan)

    def _start(self) -> None:
        self.connection, there = Pipe()
        # Ctrl-C is for the search, which asks its trials: so they have a session of their own.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quorate.tune.local_search", str(os.getpid()), str(there.fileno())],
            pass_fds=[there.fileno()],
            env={**os.environ, VISIBLE: self._visible} if gpus_here() else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        there.close()

    def stop(self) -> None:
        """End its trial in order, with a checkpoint."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    def close(self) -> int:
        """Wait for its end, and return its exit code; a trial under way, which nobody waits for, ends in order."""
        if self._process is None:
            return 0
        if self.trial is not None:
            self.stop()
        self.connection.close()
        code = self._process.wait()
        self._process = self.trial = None
        return code


def main() -> None:
    """Take plans from the search, and tell it what they come to. SIGINT ends the trial that is under way."""
    die_with_parent(int(sys.argv[1]))
    descriptor = int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as search, WarmRunner() as runner, closing(TrialRun(runner)) as run:
        signal.signal(signal.SIGINT, lambda *_: run.ask_to_stop())
        with suppress(EOFError, OSError):  # the search has ended
            while True:
                plan: Plan = search.recv()
                show_as("trials", plan.trials.parent.name)
                run.begin(plan)
                is_over = False
                while not is_over:
                    report = run.next()
                    search.send(report)
                    is_over = bool(report.ending)


if __name__ == "__main__":
    main()
