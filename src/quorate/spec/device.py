"""Which kind of device a job computes on."""

from quorate.core.gpus import gpus_here
from quorate.spec.job import JobSpec


def kind_of(spec: JobSpec) -> str:
    """`cpu` or `cuda`: as the job says, or a GPU where there is one that its strategy can use."""
    if spec.device != "auto":
        return spec.device
    is_plain_ring = spec.strategy.kind == "ring" and spec.strategy.compress is None
    return "cuda" if is_plain_ring and gpus_here() else "cpu"
