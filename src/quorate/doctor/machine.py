"""What a job may use here: memory, open files and disk."""

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from quorate.doctor.report import Finding, Level
from quorate.observe.quantities import size
from quorate.spec.job import JobSpec
from quorate.storage.lock import hold

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
