"""What a job may use here: cores, memory, open files, disk, clock, the kernel's features and the loopback network."""

import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from quorate.core.machine import cores_within
from quorate.doctor.report import Finding, Level
from quorate.observe.quantities import duration, size
from quorate.spec.job import JobSpec
from quorate.storage.lock import hold

# Measured with a small model on two workers: processes that have imported torch share most of it.
MEMORY_OF_A_JOB, MEMORY_OF_A_WORKER = 300 * 10**6, 120 * 10**6
FEW_FILES, TOO_FEW_FILES = 1024, 64
ADMINISTRATOR = "Have the hard limit raised too; in a container: docker run --ulimit nofile=4096"
LITTLE, TOO_LITTLE = 2 * 10**9, 10**8
CLOCKS_AGREE = timedelta(seconds=5)
NEEDED = {
    "fork": "workers are forked from a process that has imported torch",
    "pidfd": "the end of a worker is noticed by it",
    "parent-death signal": "workers end with their launcher by it",
}
USED = {"memfd": "workers of one host share memory by it"}
KERNEL_REMEDY = "Linux 5.3 or later has it; in a container, its seccomp profile must allow it."
HOST = "127.0.0.1"
GREETING = b"quorate"
NETWORK_REMEDY = f"Let processes of this machine talk over {HOST}: look at its firewall, or at the container's network."

_CALLER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as peer:
    peer.sendall(sys.argv[4].encode())
"""


def automatic_workers(cores: int) -> int:
    """How many workers `workers: auto` starts for a job that sets neither `lanes` nor `threads`."""
    return JobSpec(task="task.py:Task", batch_size=1024, steps=1).worker_count(cores)


def check_cores(present: int, allowed: int, quota: float | None = None) -> Finding:
    """What `workers: auto` makes of the cores of the machine that this process may run on, and whether its container
    gives the time of one of them at least."""
    workers = automatic_workers(cores_within(allowed, quota))
    lanes = JobSpec.model_fields["lanes"].default
    time = f", for the time of {quota:g}" if quota is not None and quota < allowed else ""
    text = f"{allowed} of {present} may be used{time}; `workers: auto` starts {workers} for {lanes} lanes"
    if quota is None or quota >= 1:
        return Finding("cores", Level.OK, text)
    text = f"{text}, and even a single one is made to pause"
    return Finding("cores", Level.WARNING, text, "Give the container more time: docker run --cpus=2")


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


def check_clock(now: datetime, newest_run: datetime | None) -> Finding:
    """`last` is the run that was created last, by the clock of the machine that did it."""
    if newest_run is None or newest_run - now <= CLOCKS_AGREE:
        return Finding("clock", Level.OK, f"{now:%Y-%m-%d %H:%M:%S %Z}")
    ahead = duration((newest_run - now).total_seconds())
    text = f"{now:%Y-%m-%d %H:%M:%S %Z}, but a run was created {ahead} later than that, and stays `last` until then"
    return Finding("clock", Level.WARNING, text, "Set the clock (NTP); until then give runs by their names.")


def check_temporary_folder(environment: Mapping[str, str], trial: Trial) -> Finding:
    """Where libraries put what they need for a moment."""
    said = environment.get("TMPDIR")
    if trial.trouble:
        text = f"nothing can be written in {trial.folder}: {trial.trouble}"
        return Finding("temporary files", Level.PROBLEM, text, "export TMPDIR=FOLDER with one that is writable")
    if said and Path(said).absolute() != trial.folder.absolute():
        text = f"TMPDIR is {said}, where nothing can be written; {trial.folder} is used"
        return Finding("temporary files", Level.WARNING, text, "unset TMPDIR, or make that folder writable")
    return Finding("temporary files", Level.OK, f"{trial.folder}: {size(trial.free)} free")


def check_kernel(troubles: Mapping[str, str]) -> Finding:
    """What was tried, by name, and what went wrong with it: nothing where all is well."""
    failed = {name: trouble for name, trouble in troubles.items() if trouble}
    if not failed:
        return Finding("kernel", Level.OK, f"{', '.join(troubles)} work")
    uses = NEEDED | USED
    text = "; ".join(f"{name} does not work ({trouble}), and {uses[name]}" for name, trouble in failed.items())
    return Finding("kernel", Level.PROBLEM if failed.keys() & NEEDED.keys() else Level.WARNING, text, KERNEL_REMEDY)


def check_loopback(talk: Callable[[], int]) -> Finding:
    """Two processes talk; `talk` returns the port over which they did."""
    try:
        port = talk()
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("ports", Level.PROBLEM, f"two processes cannot talk over {HOST}: {error}", NETWORK_REMEDY)
    return Finding("ports", Level.OK, f"two processes have talked over {HOST}:{port}")


def talk_to_a_child(patience: float) -> int:
    """Bind a free port and let another process call it."""
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(patience)
        port: int = server.getsockname()[1]
        command = [sys.executable, "-I", "-c", _CALLER, HOST, str(port), str(patience), GREETING.decode()]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as caller:
            try:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(patience)
                    heard = peer.recv(len(GREETING), socket.MSG_WAITALL)
                if heard != GREETING:
                    raise ConnectionError(f"{heard!r} was received instead of {GREETING!r}")
                if caller.wait(patience) != 0:
                    raise ConnectionError(f"the process that called has failed with exit code {caller.returncode}")
            finally:
                caller.kill()
    return port
