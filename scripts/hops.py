"""Counts the functions and files of the package on the way of a launch, of a step, of a save and of a worker's death.

::

    python scripts/hops.py                  all of them
    python scripts/hops.py step --list      one of them, and what was called in it

A small job is trained with `sys.setprofile` set in each of its processes. A launch is what the launcher calls, in all
its threads, from the resolved job until it has handled the first completed step; `step` is one turn of the loop of a
job with one lane on one worker, `step2` that of one of two workers with a lane each; a save is the one at the end of
the first, in all threads of the worker; a death lasts from the SIGKILL of one of two workers until the other has
completed its next step, in all processes, without what they call anyway in the second before (steps, heartbeats). What
writes and masks the log is not counted, nor are bodies of classes.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "quorate"
START, STARTED = "api/session.py start", "supervisor/worker_processes.py WorkerProcesses.note_step"
STEP, SAVE = "training/loop.py Loop._step", "training/loop.py Loop._save"
LOGGING = ("core/log_records.py", "core/masking.py", "storage/log_file.py")
CONNECT = ("collectives/connect.py connect",)
LIMIT = 120.0
STEPS = 80

TASK = """
import time
import torch
import quorate

class Tiny(quorate.Task):
    pause: float = 0.0

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def datasets(self):
        return torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))

    def loss(self, model, batch):
        time.sleep(self.pause)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""

TRACER = """
import os, sys, threading, time

ROOT, FOLDER = os.environ["HOPS_ROOT"], os.environ["HOPS_FOLDER"]
files = {}

def trace(frame, event, argument):
    if event in ("call", "return") and frame.f_code.co_filename.startswith(ROOT):
        name = frame.f_code.co_qualname
        if not frame.f_code.co_flags & 1 or name.endswith(("<genexpr>", "comp>")):
            return  # a module, a class; a generator expression or a comprehension belongs to what it stands in
        pid = os.getpid()
        file = files.get(pid)
        if file is None:
            files.clear()
            file = files[pid] = open(f"{FOLDER}/{pid}", "a", buffering=1)
        where = frame.f_code.co_filename[len(ROOT) + 1:]
        file.write(f"{time.monotonic():.6f} {threading.get_ident()} {event} {where} {name}\\n")

threading.setprofile(trace)
sys.setprofile(trace)
"""


@dataclass(frozen=True)
class Call:
    """A call of a function of the package, or the return from one."""

    time: float
    pid: int
    thread: int
    event: str
    name: str


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="launch, step, step2, save or death (default: all)")
    parser.add_argument("--list", action="store_true", help="also print what was called")
    arguments = parser.parse_args()
    wanted = arguments.what or ["launch", "step", "step2", "save", "death"]
    found: dict[str, list[str]] = {}
    if "launch" in wanted:  # with pauses: a job that is over at once ends before the launcher hears of its first step
        found["launch"] = of_launch(trained(workers=1, pause=0.05, kills=False))
    if {"step", "save"} & set(wanted):
        calls = trained(workers=1, pause=0.0, kills=False)
        found |= {"step": of_step(calls), "save": of_save(calls)}
    if "step2" in wanted:
        found["step2"] = of_step(trained(workers=2, pause=0.0, kills=False))
    if "death" in wanted:
        found["death"] = of_death(trained(workers=2, pause=0.05, kills=True))
    for what in wanted:
        names = found[what]
        print(f"{what}: {len(names)} functions in {len({name.split()[0] for name in names})} files")
        if arguments.list:
            print("".join(f"    {name}\n" for name in names), end="")


def of_launch(calls: list[Call]) -> list[str]:
    """In the launcher, from the call with the resolved job to the first step that it has handled."""
    begin = next(call for call in calls if call.name == START)
    end = next(call for call in calls if call.name == STARTED)
    return _names(call for call in calls if call.pid == begin.pid and begin.time <= call.time < end.time)


def of_step(calls: list[Call]) -> list[str]:
    """From one call of the step function to the next, by the thread that makes it: the median of the later ones."""
    first = next(call for call in calls if call.name == STEP)
    own = [call for call in calls if (call.pid, call.thread) == (first.pid, first.thread) and call.event == "call"]
    starts = [index for index, call in enumerate(own) if call.name == STEP]
    turns = [_names(own[start:stop]) for start, stop in pairwise(starts[10:])]
    return sorted(turns, key=len)[len(turns) // 2]


def of_save(calls: list[Call]) -> list[str]:
    """While the save at the end of the job lasts."""
    begin, end = [call for call in calls if call.name == SAVE][-2:]
    return _names(call for call in calls if call.pid == begin.pid and begin.time <= call.time <= end.time)


def of_death(calls: list[Call]) -> list[str]:
    """From the last call of the worker that dies."""
    workers = {call.pid for call in calls if call.name == STEP}
    last = {pid: max(call.time for call in calls if call.pid == pid) for pid in workers}
    dead = min(last, key=last.__getitem__)
    killed = last[dead]
    # The step that it was killed in ends for the other, too, by an error; the next follows when they have connected.
    connected = next(call.time for call in calls if call.time > killed and call.name in CONNECT and call.pid != dead)
    done = next(c.time for c in calls if c.name == STEP and c.event == "return" and c.time > connected)
    usual = set(_names(call for call in calls if killed - 1.0 <= call.time < killed))
    # The replacement is built meanwhile, and nobody waits for it.
    there = {call.pid for call in calls if call.time < killed}
    on_the_way = _names(call for call in calls if killed < call.time <= done and call.pid in there)
    return [name for name in on_the_way if name not in usual]


def trained(*, workers: int, pause: float, kills: bool) -> list[Call]:
    """All calls of a job, in the order of time; with `kills`, its last worker is killed on the way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traces = folder / "traces"
        traces.mkdir()
        (folder / "sitecustomize.py").write_text(TRACER)
        (folder / "tiny.py").write_text(TASK)
        keys = f"lanes: {workers}\nworkers: {workers}\nbatch_size: 8\nsteps: {STEPS}\nparams: {{pause: {pause}}}\n"
        (folder / "job.yaml").write_text(f"version: 2\ntask: tiny.py:Tiny\n{keys}")
        environment = {"PYTHONPATH": f"{PACKAGE.parent}:{name}", "HOPS_ROOT": str(PACKAGE), "HOPS_FOLDER": str(traces)}
        command = [sys.executable, "-m", "quorate", "train", "job.yaml"]
        with (folder / "log").open("w+") as log:
            job = subprocess.Popen(command, cwd=folder, env=os.environ | environment, stdout=log, stderr=log)
            try:
                if kills:
                    kill_one(traces, workers)
                job.wait(LIMIT)
            finally:
                job.kill()
            if job.returncode != 0:
                raise SystemExit(f"the job ended with exit code {job.returncode}:\n{(folder / 'log').read_text()}")
        return sorted((call for file in traces.iterdir() for call in _read(file)), key=lambda call: call.time)


def kill_one(traces: Path, workers: int) -> None:
    """Once all have trained for longer than the second that `of_death` looks back on: their start is not in it."""
    over = time.monotonic() + LIMIT
    while time.monotonic() < over:
        steps = {int(file.name): file.read_text().count(f"call {STEP}\n") for file in traces.iterdir()}
        training = [pid for pid, count in steps.items() if count >= STEPS // 2]
        if len(training) == workers:
            os.kill(max(training), signal.SIGKILL)
            return
        time.sleep(0.1)
    raise SystemExit(f"{workers} workers were to train, and only {len(training)} do")


def _read(file: Path) -> list[Call]:
    calls = []
    for line in file.read_text().splitlines():
        moment, thread, event, name = line.split(" ", 3)
        calls.append(Call(float(moment), int(file.name), int(thread), event, name))
    return calls


def _names(calls: Iterable[Call]) -> list[str]:
    """Each function once, in the order of its first call."""
    called = dict.fromkeys(call.name for call in calls if call.event == "call")
    return [name for name in called if not name.startswith(LOGGING)]


if __name__ == "__main__":
    main()
