"""All checks of this machine, carried out at once: whatever one of them does, there is a finding, and soon."""

import math
import os
import platform
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from quorate.core.errors import QuorateError
from quorate.core.machine import read_limits, usable_cores
from quorate.core.processes import describe_departure
from quorate.core.user_code import describe
from quorate.doctor import coordinators, machine, software
from quorate.doctor.probes import probe_kernel, probe_torch
from quorate.doctor.report import Finding, Level
from quorate.doctor.software import Requirement
from quorate.storage.run_folder import RunFolder

PATIENCE = 10.0
REPORT_IT = "This check itself has failed; please report it."
PACKAGE = "quorate"
TORCH = "torch"
TORCH_PATIENCE = 60.0
# For a process that starts Python: on a machine that is busy with something else this takes seconds.
PROCESS_PATIENCE = 20.0
MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Check:
    """A name, a look that may take some seconds, and how many at most."""

    name: str
    look: Callable[[], Sequence[Finding]]
    patience: float = PATIENCE


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """The findings of all checks, in their order; all are carried out at once."""
    looks = [_Look(check) for check in checks]
    for look in looks:
        yield from look.findings()


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
        Check("cores", lambda: [_cores()]),
        Check("memory", lambda: [_memory()]),
        Check("open files", lambda: [_open_files()]),
        Check("kernel", lambda: [_kernel()], 2 * PROCESS_PATIENCE),
        Check("ports", lambda: [_ports()], 2 * PROCESS_PATIENCE),
        Check("runs folder", lambda: [_runs_folder(subject.runs)]),
        Check("clock", lambda: [_clock(subject.runs)]),
        Check("temporary files", lambda: [_temporary_files(subject.environment)]),
        Check("job variables", lambda: software.check_job_variables(subject.environment)),
        Check("thread variables", lambda: [software.check_pinned_variables(subject.environment)]),
        Check("extras", lambda: list(_extras())),
        Check("coordinators", lambda: _coordinators(subject), 4 * coordinators.PATIENCE),
    ]


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
        """Wait for the end of the check, as long as it may take."""
        self._thread.join(max(0.0, self._over - time.monotonic()))
        if self._thread.is_alive():
            text = f"nothing was found out within {self.check.patience:g} s"
            return [Finding(self.check.name, Level.PROBLEM, text, "Something here hangs; look at it by hand.")]
        return self.found

    def _carry_out(self) -> None:
        try:
            self.found = list(self.check.look())
        except QuorateError as error:  # which says what to do by itself
            self.found = [Finding(self.check.name, Level.PROBLEM, error.message)]
        except Exception as error:
            self.found = [Finding(self.check.name, Level.PROBLEM, f"cannot be checked: {describe(error)}", REPORT_IT)]


def _software() -> Sequence[Finding]:
    metadata = distribution(PACKAGE).metadata
    python = software.read_requirements([f"python{metadata['Requires-Python']}"])[0]
    return [
        Finding(PACKAGE, Level.OK, version(PACKAGE)),
        software.check_system(platform.system(), platform.release(), platform.machine()),
        software.check_python(platform.python_version(), python),
        software.check_packages(_needed(extra=""), _installed(_needed(extra=""))),
    ]


def _torch() -> Sequence[Finding]:
    pinned = next((each for each in _needed(extra="") if each.package == TORCH), Requirement(TORCH))
    facts = probe_torch(TORCH_PATIENCE)
    return [software.check_torch(facts, pinned), software.check_devices(facts)]


def _extras() -> Iterator[Finding]:
    for extra in distribution(PACKAGE).metadata.get_all("Provides-Extra") or ():
        yield software.check_extra(extra, _needed(extra), _installed(_needed(extra)))


def _needed(extra: str) -> list[Requirement]:
    return [each for each in software.read_requirements(distribution(PACKAGE).requires or ()) if each.extra == extra]


def _installed(requirements: Sequence[Requirement]) -> dict[str, str]:
    versions = {}
    for requirement in requirements:
        try:
            versions[requirement.package] = version(requirement.package)
        except PackageNotFoundError:
            continue
    return versions


def _cores() -> Finding:
    cores = machine.Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), read_limits().cores)
    return machine.check_cores(cores)


def _memory() -> Finding:
    lines = (line.split() for line in MEMORY.read_text().splitlines())
    kibibytes = {words[0].rstrip(":"): int(words[1]) for words in lines}
    limits = read_limits()
    free = _least(kibibytes["MemAvailable"] * 1024, limits.free_memory)
    total = _least(kibibytes["MemTotal"] * 1024, limits.memory)
    return machine.check_memory(free, total, machine.automatic_workers(usable_cores()))


def _least(amount: int, limit: int | None) -> int:
    return amount if limit is None else min(amount, limit)


def _open_files() -> Finding:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return machine.check_open_files(soft, hard)


def _runs_folder(runs: Path) -> Finding:
    return machine.check_runs_folder(runs, machine.try_to_write(machine.nearest_folder(runs)))


def _clock(runs: Path) -> Finding:
    newest = max((run.created for run in RunFolder.all_in(runs)), default=None)
    return machine.check_clock(datetime.now(UTC), newest)


def _ports() -> Finding:
    return machine.check_loopback(lambda: machine.talk_to_a_child(PROCESS_PATIENCE))


def _kernel() -> Finding:
    try:
        return machine.check_kernel(probe_kernel(PROCESS_PATIENCE))
    except subprocess.TimeoutExpired:
        text = f"not known: the process that tries its features has not ended within {PROCESS_PATIENCE:g} s"
        return Finding("kernel", Level.WARNING, text, "If this machine is busy just now, ask again later.")
    except subprocess.CalledProcessError as error:
        text = f"the process that tries its features {describe_departure(error.returncode)}"
        return Finding("kernel", Level.PROBLEM, text, machine.KERNEL_REMEDY)


def _temporary_files(environment: Mapping[str, str]) -> Finding:
    try:
        trial = machine.try_to_write(Path(tempfile.gettempdir()))
    except FileNotFoundError as error:  # in none of the usual places
        trial = machine.Trial(Path(environment.get("TMPDIR", "/tmp")), trouble=str(error))
    return machine.check_temporary_folder(environment, trial)


def _coordinators(subject: Subject) -> Sequence[Finding]:
    runs = [subject.run] if subject.run is not None else coordinators.running(subject.runs)
    if not runs:
        return [Finding("coordinators", Level.OK, f"no job is running in {subject.runs}")]
    patience = 3 * coordinators.PATIENCE  # for a connection, a call, and the imports before them
    return list(examine([Check(f"run {run.name}", partial(_coordinator, run), patience) for run in runs]))


def _coordinator(run: RunFolder) -> Sequence[Finding]:
    return [coordinators.check_coordinator(run, coordinators.call_coordinator)]
