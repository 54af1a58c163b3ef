"""All checks of this machine, with the facts that each of them is about."""

import math
import os
import platform
import resource
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from quorate.core.cgroup import read_limits
from quorate.core.cores import usable_cores
from quorate.core.processes import describe_departure
from quorate.doctor import coordinators
from quorate.doctor.disk import (
    Trial,
    check_clock,
    check_runs_folder,
    check_temporary_folder,
    nearest_folder,
    try_to_write,
)
from quorate.doctor.examination import PATIENCE, Check, examine
from quorate.doctor.finding import Finding, Level
from quorate.doctor.kernel import REMEDY as KERNEL_REMEDY
from quorate.doctor.kernel import check_kernel
from quorate.doctor.kernel_probe import probe_kernel
from quorate.doctor.machine import (
    Cores,
    automatic_workers,
    check_cores,
    check_memory,
    check_open_files,
)
from quorate.doctor.network import check_loopback, talk_to_a_child
from quorate.doctor.requirement import Requirement, read_requirements
from quorate.doctor.software import check_extra, check_packages, check_python, check_system
from quorate.doctor.surroundings import check_job_variables, check_pinned_variables
from quorate.doctor.torch_checks import check_devices, check_torch
from quorate.doctor.torch_probe import probe_torch
from quorate.storage.run_folder import RunFolder

PACKAGE = "quorate"
TORCH = "torch"
TORCH_PATIENCE = 60.0
# For a process that starts Python: on a machine that is busy with something else this takes seconds.
PROCESS_PATIENCE = 20.0
MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Subject:
    """What is looked at: this machine, the folder of run folders, and one run or all that are running."""

    runs: Path
    environment: Mapping[str, str]
    run: RunFolder | None = None


def checks_of(subject: Subject) -> Sequence[Check]:
    """Everything that is checked, in the order in which it is told. Nothing has been looked at yet."""
    return [
        Check("quorate", _software),
        Check(TORCH, _torch, TORCH_PATIENCE + PATIENCE),
        Check("cores", lambda: [check_cores(_cores())]),
        Check("memory", lambda: [_memory()]),
        Check("open files", lambda: [check_open_files(*_open_files())]),
        Check("kernel", lambda: [_kernel()], 2 * PROCESS_PATIENCE),
        Check("ports", lambda: [check_loopback(lambda: talk_to_a_child(PROCESS_PATIENCE))], 2 * PROCESS_PATIENCE),
        Check("runs folder", lambda: [check_runs_folder(subject.runs, try_to_write(nearest_folder(subject.runs)))]),
        Check("clock", lambda: [check_clock(datetime.now(UTC), _newest(subject.runs))]),
        Check("temporary files", lambda: [_temporary_files(subject.environment)]),
        Check("job variables", lambda: check_job_variables(subject.environment)),
        Check("thread variables", lambda: [check_pinned_variables(subject.environment)]),
        Check("extras", lambda: list(_extras())),
        Check("coordinators", lambda: _coordinators(subject), 4 * coordinators.PATIENCE),
    ]


def _software() -> Sequence[Finding]:
    metadata = distribution(PACKAGE).metadata
    python = read_requirements([f"python{metadata['Requires-Python']}"])[0]
    return [
        Finding(PACKAGE, Level.OK, version(PACKAGE)),
        check_system(platform.system(), platform.release(), platform.machine()),
        check_python(platform.python_version(), python),
        check_packages(_needed(extra=""), _installed(_needed(extra=""))),
    ]


def _torch() -> Sequence[Finding]:
    pinned = next((each for each in _needed(extra="") if each.package == TORCH), Requirement(TORCH))
    facts = probe_torch(TORCH_PATIENCE)
    return [check_torch(facts, pinned), check_devices(facts)]


def _extras() -> Iterator[Finding]:
    for extra in distribution(PACKAGE).metadata.get_all("Provides-Extra") or ():
        yield check_extra(extra, _needed(extra), _installed(_needed(extra)))


def _needed(extra: str) -> list[Requirement]:
    return [each for each in read_requirements(distribution(PACKAGE).requires or ()) if each.extra == extra]


def _installed(requirements: Sequence[Requirement]) -> dict[str, str]:
    versions = {}
    for requirement in requirements:
        try:
            versions[requirement.package] = version(requirement.package)
        except PackageNotFoundError:
            continue
    return versions


def _cores() -> Cores:
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), read_limits().cores)


def _memory() -> Finding:
    lines = (line.split() for line in MEMORY.read_text().splitlines())
    kibibytes = {words[0].rstrip(":"): int(words[1]) for words in lines}
    limits = read_limits()
    free = _least(kibibytes["MemAvailable"] * 1024, limits.free_memory)
    total = _least(kibibytes["MemTotal"] * 1024, limits.memory)
    return check_memory(free, total, automatic_workers(usable_cores()))


def _least(amount: int, limit: int | None) -> int:
    return amount if limit is None else min(amount, limit)


def _open_files() -> tuple[float, float]:
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    return math.inf if limit == infinite else limit, math.inf if highest == infinite else highest


def _newest(runs: Path) -> datetime | None:
    return max((run.created for run in RunFolder.all_in(runs)), default=None)


def _kernel() -> Finding:
    try:
        return check_kernel(probe_kernel(PROCESS_PATIENCE))
    except subprocess.TimeoutExpired:
        text = f"not known: the process that tries its features has not ended within {PROCESS_PATIENCE:g} s"
        return Finding("kernel", Level.WARNING, text, "If this machine is busy just now, ask again later.")
    except subprocess.CalledProcessError as error:
        text = f"the process that tries its features {describe_departure(error.returncode)}"
        return Finding("kernel", Level.PROBLEM, text, KERNEL_REMEDY)


def _temporary_files(environment: Mapping[str, str]) -> Finding:
    try:
        trial = try_to_write(Path(tempfile.gettempdir()))
    except FileNotFoundError as error:  # in none of the usual places
        trial = Trial(Path(environment.get("TMPDIR", "/tmp")), trouble=str(error))
    return check_temporary_folder(environment, trial)


def _coordinators(subject: Subject) -> Sequence[Finding]:
    runs = [subject.run] if subject.run is not None else coordinators.running(subject.runs)
    if not runs:
        return [Finding("coordinators", Level.OK, f"no job is running in {subject.runs}")]
    patience = 3 * coordinators.PATIENCE  # for a connection, a call, and the imports before them
    return list(examine([Check(f"run {run.name}", partial(_coordinator, run), patience) for run in runs]))


def _coordinator(run: RunFolder) -> Sequence[Finding]:
    return [coordinators.check_coordinator(run, coordinators.call_coordinator)]
