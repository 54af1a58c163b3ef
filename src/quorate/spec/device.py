"""Which kind of device a job computes on, and how many workers share it."""

from quorate.core.generation import FIRST_SERVER
from quorate.core.gpus import gpus_here, torch_has_cuda
from quorate.spec.job import JobSpec


def kind_of(spec: JobSpec) -> str:
    """`cpu` or `cuda`: as the job says, or a GPU where there is one that its strategy and torch can use.

    On a cluster this machine says nothing of the others: `auto` is a GPU if the job asks for one for each worker.
    """
    if spec.device != "auto":
        return spec.device
    if spec.engine.is_cluster:
        return "cuda" if spec.engine.gpus_each(spec.device) else "cpu"
    return "cuda" if spec.strategy.cpu_only is None and gpus_here() and torch_has_cuda() else "cpu"


def workers_here(spec: JobSpec, cores: int) -> int:
    """How many workers to start from this machine: with `auto` as many as its cores allow, or as it has GPUs.

    Several workers of one GPU take turns there, and exchange what one would simply add up.
    """
    if spec.workers != "auto" or spec.engine.is_cluster or kind_of(spec) == "cpu":
        return spec.worker_count(cores)
    return max(spec.min_workers, min(spec.lanes, len(gpus_here()) or 1))


def gpu_of(member: int, gpus: int) -> int:
    """Which of so many GPUs a worker or a server computes on: workers take turns from the first on, servers from the
    last, so that none has two of them while another has none."""
    return member % gpus if member < FIRST_SERVER else gpus - 1 - (member - FIRST_SERVER) % gpus


def idle_gpus(spec: JobSpec, workers: int) -> str | None:
    """What to say of GPUs that nobody will compute on; None where all are used, or none was to be."""
    if spec.engine.is_cluster:
        return None
    there = len(gpus_here())
    key = spec.strategy.cpu_only if spec.device == "auto" else None
    if key is not None and there and torch_has_cuda():
        return f"{there} GPU{'s stay' if there > 1 else ' stays'} idle: {key} computes on the CPU in this version."
    servers = spec.strategy.server_count
    idle = there - workers - servers
    if kind_of(spec) == "cpu" or idle <= 0:
        return None
    who = "each worker and server" if servers else "each worker"
    stay = f"{idle} of {there} GPUs {'stay' if idle > 1 else 'stays'} idle: {who} computes on one, and"
    if spec.lanes < there and workers == spec.lanes:
        return f"{stay} `lanes: {spec.lanes}` allows no more workers. `lanes: {there}` does; it changes the bits."
    members = workers + servers
    more = min(there - servers, spec.lanes)
    return f"{stay} there {'are' if members > 1 else 'is'} {members}. `--workers {more}` uses more."
