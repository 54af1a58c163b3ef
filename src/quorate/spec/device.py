"""Which kind of device a job computes on, and how many workers share it."""

from quorate.core.gpus import gpus_here, torch_has_cuda
from quorate.spec.job import JobSpec


def kind_of(spec: JobSpec) -> str:
    """`cpu` or `cuda`: as the job says, or a GPU where there is one that its strategy and torch can use."""
    if spec.device != "auto":
        return spec.device
    is_plain_ring = spec.strategy.kind == "ring" and spec.strategy.compress is None
    return "cuda" if is_plain_ring and gpus_here() and torch_has_cuda() else "cpu"


def workers_here(spec: JobSpec, cores: int) -> int:
    """How many workers to start on this machine: with `auto` as many as its cores allow, or as it has GPUs.

    Several workers of one GPU take turns there, and exchange what one would simply add up.
    """
    if spec.workers != "auto" or kind_of(spec) == "cpu":
        return spec.worker_count(cores)
    return max(spec.min_workers, min(spec.lanes, len(gpus_here()) or 1))


def idle_gpus(spec: JobSpec, workers: int) -> str | None:
    """What to say of GPUs that nobody will compute on; None where all are used, or none was to be."""
    there = len(gpus_here()) if kind_of(spec) == "cuda" else 0
    if workers >= there:
        return None
    idle = there - workers
    stay = f"{idle} of {there} GPUs {'stay' if idle > 1 else 'stays'} idle: each worker computes on one, and"
    if spec.lanes < there and workers == spec.lanes:
        return f"{stay} `lanes: {spec.lanes}` allows no more workers. `lanes: {there}` does; it changes the bits."
    return f"{stay} there {'are' if workers > 1 else 'is'} {workers}. `--workers {min(there, spec.lanes)}` uses more."
