"""Cores, memory and open files: what a job may use here."""

import math
from dataclasses import dataclass

from quorate.core.cores import cores_within
from quorate.doctor.finding import Finding, Level
from quorate.observe.quantities import size
from quorate.spec.job import JobSpec

MEGABYTE = 10**6
# Measured with a small model on two workers: processes that have imported torch share most of it.
MEMORY_OF_A_JOB = 300 * MEGABYTE
MEMORY_OF_A_WORKER = 120 * MEGABYTE
FEW_FILES, TOO_FEW_FILES = 1024, 64
ADMINISTRATOR = "Have the hard limit raised too; in a container: docker run --ulimit nofile=4096"


@dataclass(frozen=True)
class Cores:
    """Cores of the machine, those that this process may run on, and the time that its container is given."""

    present: int
    allowed: int
    quota: float | None = None


def automatic_workers(cores: int) -> int:
    """How many workers `workers: auto` starts for a job that sets neither `lanes` nor `threads`."""
    return JobSpec(task="task.py:Task", batch_size=1024, steps=1).worker_count(cores)


def check_cores(cores: Cores) -> Finding:
    """What `workers: auto` makes of the cores, and whether the container gives one of them at least."""
    workers = automatic_workers(cores_within(cores.allowed, cores.quota))
    lanes = JobSpec.model_fields["lanes"].default
    text = f"{cores.allowed} of {cores.present} may be used"
    if cores.quota is not None and cores.quota < cores.allowed:
        text = f"{text}, for the time of {cores.quota:g}"
    text = f"{text}; `workers: auto` starts {workers} for {lanes} lanes"
    if cores.quota is None or cores.quota >= 1:
        return Finding("cores", Level.OK, text)
    text = f"{text}, and even a single one is made to pause"
    return Finding("cores", Level.WARNING, text, "Give the container more time: docker run --cpus=2")


def check_memory(free: int, total: int, workers: int) -> Finding:
    """Whether workers fit in, before their model and data."""
    needed = MEMORY_OF_A_JOB + workers * MEMORY_OF_A_WORKER
    text = f"{size(free)} free of {size(total)}"
    remedy = "Train on fewer workers (--workers 1), or end what else runs here."
    if free < needed:
        told = f"{text}; {workers} workers take about {size(needed)} before their model and data"
        return Finding("memory", Level.PROBLEM, told, remedy)
    if free < 2 * needed:
        told = f"{text}, of which {workers} workers take about {size(needed)} before their model and data"
        return Finding("memory", Level.WARNING, told, remedy)
    return Finding("memory", Level.OK, text)


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
