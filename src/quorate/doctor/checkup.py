"""All checks of this machine and of the jobs that run on it, carried out at once.

Whatever one of them does, there is a finding, and soon.
"""

import math
import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from quorate.core.addresses import split_address
from quorate.core.errors import FrameError, LinkError, QuorateError
from quorate.core.installation import install_of
from quorate.core.machine import free_memory, read_limits, usable_cores
from quorate.core.user_code import describe
from quorate.doctor import software
from quorate.doctor.report import Finding, Level
from quorate.observe.quantities import size
from quorate.spec.job import JobSpec
from quorate.spec.load import resolve_mapping
from quorate.storage.fencing import hold
from quorate.storage.run_folder import Door, RunFolder

PATIENCE = 10.0
TORCH_PATIENCE = 60.0
CLUSTER_PATIENCE = 600.0

Call = Callable[[Door], bool]
"""Call the coordinator at this door: whether its job has ended. LinkError if nobody answers."""


@dataclass(frozen=True)
class Check:
    """A name, a look that may take some seconds, and how many at most."""

    name: str
    look: Callable[[], Finding | Sequence[Finding]]
    patience: float = PATIENCE


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """The findings of all checks, in their order; all are carried out at once."""
    began, looks = time.monotonic(), []
    for check in checks:
        found: list[Finding] = []
        # A daemon: a check that hangs must not keep the command from ending.
        thread = threading.Thread(target=_carry_out, args=(check, found), name=check.name, daemon=True)
        thread.start()
        looks.append((check, thread, found))
    for check, thread, found in looks:
        thread.join(max(0.0, began + check.patience - time.monotonic()))
        if thread.is_alive():
            text = f"no answer within {check.patience:g} s"
            yield Finding(check.name, Level.PROBLEM, text, "Something here hangs; check it by hand.")
        else:
            yield from found


def _carry_out(check: Check, found: list[Finding]) -> None:
    try:
        seen = check.look()
        found += [seen] if isinstance(seen, Finding) else seen
    except QuorateError as error:  # which says what to do by itself
        found.append(Finding(check.name, Level.PROBLEM, error.message))
    except Exception as error:
        text = f"cannot be checked: {describe(error)}"
        found.append(Finding(check.name, Level.PROBLEM, text, "This check failed itself; please report it."))


def checks_of(runs: Path, environment: Mapping[str, str], run: RunFolder | None = None) -> Sequence[Check]:
    """Everything that is checked, in the order in which it is told: this machine, the folder of run folders, and one
    run or all that are running. Nothing has been looked at yet."""
    return [
        Check("quorate", software.check_installation),
        Check("torch", lambda: _torch(environment, run), TORCH_PATIENCE + PATIENCE),
        Check("memory", _memory),
        Check("open files", _open_files),
        Check("runs folder", lambda: check_runs_folder(runs)),
        Check("extras", software.check_extras),
        Check("coordinators", lambda: _coordinators(runs, run), 4 * PATIENCE),
    ]


def checks_of_engine(kind: str, address: str | None, storage: str | None) -> Sequence[Check]:
    """What is checked of an engine beside this machine: it is named like that of a job, and refused like it."""
    keys = {"kind": kind, "address": address, "storage": storage}
    given = {key: value for key, value in keys.items() if value is not None}
    job = {"task": "package.module:Task", "batch_size": 8, "steps": 1, "engine": given}
    engine = resolve_mapping(job, "the command line", {}, []).spec.engine
    if not engine.is_cluster:
        return []
    return [Check("cluster", lambda: _cluster(engine.model_dump()), CLUSTER_PATIENCE)]


def _torch(environment: Mapping[str, str], run: RunFolder | None) -> Sequence[Finding]:
    facts = software.probe_torch(TORCH_PATIENCE)
    found = list(software.check_torch_here(facts))
    if find_spec("quorate.strategies.gangs") is not None:  # an option, and the only one that uses NCCL
        from quorate.doctor.nccl import Network, check_nccl, settings_of

        nccl = settings_of(environment, None if run is None else run.job_file)
        found += check_nccl(facts, Network.here(), nccl, environment)
    return found


def _cluster(engine: Mapping[str, Any]) -> Sequence[Finding]:
    if find_spec("ray") is None:
        text = "the library ray is not installed here, so a cluster cannot be asked"
        return [Finding("cluster", Level.PROBLEM, text, install_of("ray"))]
    from quorate.doctor.cluster import NodeProbe, judge, read_cluster

    return judge(read_cluster(engine["address"], engine["storage"]), NodeProbe().versions())


def _memory() -> Finding:
    # As many workers as `workers: auto` starts for a job that sets neither `lanes` nor `threads`.
    workers = JobSpec(task="task.py:Task", batch_size=1024, steps=1).worker_count(usable_cores())
    total = psutil.virtual_memory().total
    return check_memory(free_memory(), min(total, read_limits().memory or total), workers)


def _open_files() -> Finding:
    soft, hard = (
        math.inf if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return check_open_files(soft, hard)


def _coordinators(folder: Path, run: RunFolder | None) -> Sequence[Finding]:
    runs = [run] if run is not None else running(folder)
    if not runs:
        return [Finding("coordinators", Level.OK, f"no job is running in {folder}")]
    patience = 3 * PATIENCE  # for a connection, a call, and the imports before them

    looks = {run.name: partial(check_coordinator, run, call_coordinator) for run in runs}
    return list(examine([Check(f"run {name}", look, patience) for name, look in looks.items()]))


def running(runs: Path) -> Sequence[RunFolder]:
    """The runs in a folder that say where their coordinator is."""
    return [run for run in RunFolder.all_in(runs) if run.address_file.exists()]


def check_coordinator(run: RunFolder, call: Call) -> Finding:
    """Whether the coordinator of a run answers."""
    name = f"run {run.name}"
    remedy = (
        f"Look at quorate logs {run.name}; if the job does not continue, quorate stop {run.name} --now, and then: "
        f"quorate resume {run.name}"
    )
    try:
        door = run.read_door()
    except FileNotFoundError:
        if run.holder() is not None:
            return Finding(name, Level.NOTE, "is starting or ending: its coordinator does not listen")
        result = run.whole_result()
        ending = "without a result" if result is None else result.get("status", "over")
        return Finding(name, Level.NOTE, f"is not running ({ending})")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        return Finding(name, Level.WARNING, f"{run.address_file} cannot be read: {why}", remedy)
    try:
        doing = "its job has just ended" if call(door) else "its job is under way"
        return Finding(name, Level.OK, f"its coordinator answers at {door.address}: {doing}")
    except LinkError as error:
        is_other = isinstance(error, FrameError)
        text = f"another job's coordinator listens at {door.address}" if is_other else str(error)
    holder = run.holder()
    if holder is None:
        left = f"{text}; nothing works on this run any longer"
        return Finding(name, Level.WARNING, left, f"quorate resume {run.name}")
    return Finding(name, Level.PROBLEM, f"{text}, although {holder} is at work on this run", remedy)


def call_coordinator(door: Door) -> bool:
    """Ask whether the job has ended. A port that nobody listens on is found at once, without gRPC's patience."""
    from quorate.coordinator.client import SupervisorClient

    try:
        socket.create_connection(split_address(door.address), timeout=PATIENCE).close()
    except OSError as error:
        raise LinkError(f"nothing listens at {door.address} ({error.strerror or error})") from None
    client = SupervisorClient(door.address, door.token, PATIENCE, authority=door.authority)
    try:
        return client.news(timeout=0).outcome is not None
    finally:
        client.close()


# Measured with a small model on two workers: processes that have imported torch share most of it.
MEMORY_OF_A_JOB, MEMORY_OF_A_WORKER = 300 * 10**6, 120 * 10**6
FEW_FILES, TOO_FEW_FILES = 1024, 64
ADMINISTRATOR = "Have the hard limit raised too; in a container: docker run --ulimit nofile=4096"
LITTLE, TOO_LITTLE = 2 * 10**9, 10**8


def check_memory(free: int, total: int, workers: int) -> Finding:
    """Whether workers fit in, before their model and data."""
    needed = MEMORY_OF_A_JOB + workers * MEMORY_OF_A_WORKER
    text = f"{size(free)} free of {size(total)}"
    if free >= 2 * needed:
        return Finding("memory", Level.OK, text)
    level, joint = (Level.PROBLEM, ";") if free < needed else (Level.WARNING, ", of which")
    text = f"{text}{joint} {workers} workers take about {size(needed)} before their model and data"
    return Finding("memory", level, text, "Train on fewer workers (--workers 1), or end what else runs here.")


def check_open_files(limit: float, highest: float) -> Finding:
    """How many descriptors a process may have, and how many it might ask for; infinite where there is no limit."""
    if math.isinf(limit):
        return Finding("open files", Level.OK, "as many as are wanted")
    text = f"{limit:,.0f} at once for each process"
    raised = f"ulimit -n {min(highest, 4 * FEW_FILES):.0f}" if highest > limit else ADMINISTRATOR
    if limit < TOO_FEW_FILES:
        return Finding("open files", Level.PROBLEM, f"{text}; a job needs {TOO_FEW_FILES}", raised)
    if limit < FEW_FILES:
        return Finding("open files", Level.WARNING, f"{text}; with loader_workers it may be too few", raised)
    return Finding("open files", Level.OK, text)


def check_runs_folder(runs: Path) -> Finding:
    """Whether runs can be made there: a file is written as a run does, locked, and removed again. A folder that is not
    there yet is judged by the nearest one above."""
    elsewhere = "Choose another folder with `runs`, such as --set runs=/data/runs"
    wanted = runs.absolute()
    folder = next((place for place in (wanted, *wanted.parents) if place.exists()), Path("/"))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".quorate-doctor-") as file:
            file.write(b"may I?\n")
            file.flush()
            os.fsync(file.fileno())
            with hold(Path(file.name)):
                pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"nothing can be written in {folder}: {error.strerror or error}"
        return Finding("runs folder", Level.PROBLEM, text, elsewhere)
    text = f"{runs}{'' if folder == wanted else ', made by the first run'}: {size(free)} free"
    if free < TOO_LITTLE:
        return Finding("runs folder", Level.PROBLEM, text, f"Make room, or: {elsewhere}")
    if free < LITTLE:
        text = f"{text}; checkpoints may fill it"
        return Finding("runs folder", Level.WARNING, text, "Make room, or keep fewer with checkpoint: {keep: 1}")
    return Finding("runs folder", Level.OK, text)
