"""All checks of this machine and of the jobs that run on it, carried out at once.

Whatever one of them does, there is a finding, and soon.
"""

import math
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from quorate.core.addresses import split_address
from quorate.core.errors import FrameError, LinkError, QuorateError, RunError
from quorate.core.installation import install_of
from quorate.core.machine import read_limits, usable_cores
from quorate.core.user_code import describe
from quorate.doctor import software
from quorate.doctor.cluster import judge
from quorate.doctor.nccl import Network, check_nccl, settings_of
from quorate.doctor.node_probe import NodeProbe
from quorate.doctor.probes import probe_torch
from quorate.doctor.report import Finding, Level
from quorate.engines.ray.option import RaySpec
from quorate.observe.quantities import size
from quorate.spec.job import JobSpec
from quorate.spec.load import resolve_mapping
from quorate.storage.fencing import hold
from quorate.storage.run_folder import Door, RunFolder

PATIENCE = 10.0
TORCH_PATIENCE = 60.0
CLUSTER_PATIENCE = 600.0
REPORT_IT = "This check failed itself; please report it."

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
    looks = [_Look(check) for check in checks]
    for look in looks:
        yield from look.findings()


def checks_of(runs: Path, environment: Mapping[str, str], run: RunFolder | None = None) -> Sequence[Check]:
    """Everything that is checked, in the order in which it is told: this machine, the folder of run folders, and one
    run or all that are running. Nothing has been looked at yet."""
    return [
        Check("quorate", software.check_installation),
        Check("torch", lambda: _torch(environment, run), TORCH_PATIENCE + PATIENCE),
        Check("memory", _memory),
        Check("open files", _open_files),
        Check("runs folder", lambda: check_runs_folder(runs, try_to_write(nearest_folder(runs)))),
        Check("job variables", lambda: software.check_job_variables(environment)),
        Check("extras", software.check_extras),
        Check("coordinators", lambda: _coordinators(runs, run), 4 * PATIENCE),
    ]


def checks_of_engine(kind: str, address: str | None, storage: str | None) -> Sequence[Check]:
    """What is checked of an engine beside this machine: it is named like that of a job, and refused like it."""
    keys = {"kind": kind, "address": address, "storage": storage}
    given = {key: value for key, value in keys.items() if value is not None}
    job = {"task": "package.module:Task", "batch_size": 8, "steps": 1, "engine": given}
    engine = resolve_mapping(job, "the command line", {}, []).spec.engine
    return [Check("cluster", lambda: _cluster(engine), CLUSTER_PATIENCE)] if isinstance(engine, RaySpec) else []


@dataclass
class _Look:
    """A check under way. Its thread is a daemon: one that hangs must not keep the command from ending."""

    check: Check
    found: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = time.monotonic() + self.check.patience
        self._thread = threading.Thread(target=self._carry_out, name=self.check.name, daemon=True)
        self._thread.start()

    def findings(self) -> list[Finding]:
        self._thread.join(max(0.0, self._over - time.monotonic()))
        if self._thread.is_alive():
            text = f"no answer within {self.check.patience:g} s"
            return [Finding(self.check.name, Level.PROBLEM, text, "Something here hangs; check it by hand.")]
        return self.found

    def _carry_out(self) -> None:
        try:
            found = self.check.look()
            self.found = [found] if isinstance(found, Finding) else list(found)
        except QuorateError as error:  # which says what to do by itself
            self.found = [Finding(self.check.name, Level.PROBLEM, error.message)]
        except Exception as error:
            self.found = [Finding(self.check.name, Level.PROBLEM, f"cannot be checked: {describe(error)}", REPORT_IT)]


def _torch(environment: Mapping[str, str], run: RunFolder | None) -> Sequence[Finding]:
    facts = probe_torch(TORCH_PATIENCE)
    recorded = None if run is None else run.job_file
    nccl, network = settings_of(environment, recorded), Network.here()
    return [*software.check_torch_here(facts), *check_nccl(facts, network, nccl, environment)]


def _cluster(engine: RaySpec) -> Sequence[Finding]:
    if find_spec("ray") is None:
        text = "the library ray is not installed here, so a cluster cannot be asked"
        return [Finding("cluster", Level.PROBLEM, text, install_of("ray"))]
    from quorate.doctor.ray_cluster import read_cluster

    return judge(read_cluster(engine.address, engine.storage), NodeProbe().facts()["versions"])


def _memory() -> Finding:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kibibytes = {words[0].rstrip(":"): int(words[1]) for words in lines}
    limits = read_limits()
    free, total = kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024
    free = free if limits.free_memory is None else min(free, limits.free_memory)
    total = total if limits.memory is None else min(total, limits.memory)
    return check_memory(free, total, automatic_workers(usable_cores()))


def _open_files() -> Finding:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
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
        door = _read_door(run)
    except FileNotFoundError:
        if run.holder() is not None:
            return Finding(name, Level.NOTE, "is starting or ending: its coordinator does not listen")
        result = run.whole_result()
        ending = "without a result" if result is None else result.get("status", "over")
        return Finding(name, Level.NOTE, f"is not running ({ending})")
    except RunError as error:
        return Finding(name, Level.WARNING, f"where its coordinator is cannot be read: {error.message}", remedy)
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


def _read_door(run: RunFolder) -> Door:
    """Where the coordinator is asked; FileNotFoundError if there is none, as when no job runs."""
    try:
        return run.read_door()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{run.address_file}: {error.strerror}") from None
    except ValueError:
        raise RunError(f"{run.address_file} is damaged") from None


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


def automatic_workers(cores: int) -> int:
    """How many workers `workers: auto` starts for a job that sets neither `lanes` nor `threads`."""
    return JobSpec(task="task.py:Task", batch_size=1024, steps=1).worker_count(cores)


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


@dataclass(frozen=True)
class Trial:
    """What came of writing a file in a folder: trouble, or a file; and how much space there is."""

    folder: Path
    trouble: str = ""
    free: int = 0


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there already."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def try_to_write(folder: Path) -> Trial:
    """Write a file as a run does, lock it, and remove it again."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".quorate-doctor-") as file:
            file.write(b"may I?\n")
            file.flush()
            os.fsync(file.fileno())
            with hold(Path(file.name)):
                pass
        space = os.statvfs(folder)
    except OSError as error:
        return Trial(folder, trouble=error.strerror or str(error))
    return Trial(folder, free=space.f_bavail * space.f_frsize)


def check_runs_folder(runs: Path, trial: Trial) -> Finding:
    """Whether runs can be made in it. The trial was made there, or in the nearest folder above that is there."""
    elsewhere = "Choose another folder with `runs`, such as --set runs=/data/runs"
    if trial.trouble:
        text = f"nothing can be written in {trial.folder}: {trial.trouble}"
        return Finding("runs folder", Level.PROBLEM, text, elsewhere)
    made = "" if trial.folder == runs.absolute() else ", made by the first run"
    text = f"{runs}{made}: {size(trial.free)} free"
    if trial.free < TOO_LITTLE:
        return Finding("runs folder", Level.PROBLEM, text, f"Make room, or: {elsewhere}")
    if trial.free < LITTLE:
        text = f"{text}; checkpoints may fill it"
        return Finding("runs folder", Level.WARNING, text, "Make room, or keep fewer with checkpoint: {keep: 1}")
    return Finding("runs folder", Level.OK, text)
