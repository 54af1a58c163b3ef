"""Memory that could not be had: how it is known, and what a job needs less of it with."""

import re

import torch

from quorate.core.machine import is_shortage
from quorate.spec.job import JobSpec

OUT_OF_MEMORY = (
    r"out of memory|DefaultCPUAllocator: can't allocate|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)


def out_of_memory(error: BaseException) -> BaseException | None:
    """What tells that memory could not be had, of the device or of the host: the error itself, or its cause."""
    for each in (error, error.__cause__):
        is_short = isinstance(each, RuntimeError) and re.search(OUT_OF_MEMORY, str(each))
        if each is not None and (is_short or isinstance(each, torch.OutOfMemoryError) or is_shortage(each)):
            return each
    return None


def what_needs_less_memory(spec: JobSpec) -> str:
    """What to change in a job whose lanes do not fit into memory."""
    activations = (
        ""
        if spec.memory.checkpoint_activations
        else "compute activations again (memory: {checkpoint_activations: true}), "
    )
    return (
        f"To need less: a smaller batch_size (now {spec.batch_size}), {activations}a larger accumulate (now "
        f"{spec.accumulate}), or more lanes (now {spec.lanes}) on more workers."
    )
