"""Hints for exceptions that user code meets in training: each is surely right for what was raised, or there is none."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from quorate.core.machine import is_shortage
from quorate.spec.job import JobSpec


class Share(NamedTuple):
    """What a lane had to work on: its samples of a batch, in a job."""

    samples: int
    batch_samples: int
    spec: JobSpec

    def hint(self, error: BaseException) -> str:
        return hint_for(error, self)


def hint_for(error: BaseException, share: Share | None = None) -> str:
    """A hint that is surely right for this exception, or nothing."""
    for pattern, say in _HINTS:
        found = re.search(pattern, str(error), re.IGNORECASE)
        if found is not None:
            return say(found, share) if callable(say) else say
    return ""


def out_of_memory(error: BaseException) -> BaseException | None:
    """What tells that memory could not be had, of the device or of the host: the error itself, or its cause."""
    for each in (error, error.__cause__):
        is_short = isinstance(each, RuntimeError) and re.search(_OUT_OF_MEMORY, str(each))
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


def _too_large(_: re.Match[str], share: Share | None) -> str:
    if share is None:
        return ""
    spec = share.spec
    shrink = " `on_out_of_memory: shrink` raises accumulate by itself." if spec.strategy.kind == "ring" else ""
    samples = "1 sample" if share.samples == 1 else f"{share.samples} samples"
    return f"Memory ran out with {samples} at a time. {what_needs_less_memory(spec)}{shrink}"


def _lonely_sample(_: re.Match[str], share: Share | None) -> str:
    if share is None or share.samples != 1:
        return ""
    spec = share.spec
    accumulate = f" × accumulate {spec.accumulate}" if spec.accumulate > 1 else ""
    is_rest = share.batch_samples < spec.batch_size
    kept = "; last_batch: keep" if is_rest else ""
    enough = 2 * spec.lanes * spec.accumulate
    remedy = "Drop such a rest (last_batch: drop)" if is_rest else f"Use a batch_size of at least {enough}"
    return (
        f"Batch normalization needs at least 2 samples at a time, and this lane had 1: {share.batch_samples} samples "
        f"for {spec.lanes} lanes{accumulate} (batch_size: {spec.batch_size}{kept}). {remedy}, or use fewer lanes."
    )


def _class_out_of_bounds(found: re.Match[str], _: Share | None) -> str:
    needed = int(found[1]) + 1
    return f"Classes count from 0, so a target of {found[1]} needs a model with at least {needed} outputs."


Say = Callable[[re.Match[str], Share | None], str]

_OUT_OF_MEMORY = (
    r"out of memory|DefaultCPUAllocator: can't allocate|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
_HINTS: tuple[tuple[str, str | Say], ...] = (
    (_OUT_OF_MEMORY, _too_large),
    (r"Expected more than 1 value per channel when training", _lonely_sample),
    (
        r"does not have a deterministic implementation",
        "`deterministic: false` in the job file allows it; the bits may then differ from run to run.",
    ),
    (
        r"dtype, but got Double and Float|Input type \(double\) and (bias|weight) type \(float\)",
        "NumPy's numbers are float64 and a model's weights float32: convert the data, as with .float().",
    ),
    (
        r"dtype, but got (Long|Int|Byte|Bool) and Float|Input type \((long|int|unsigned char|bool)\) and",
        "A layer computes with floats: convert its input, as with .float().",
    ),
    (
        r"expected target dtype to be Long|expected scalar type Long but found",
        "Targets of this loss are classes, whole numbers of 64 bits: convert them, as with .long().",
    ),
    (r"Target (\d+) is out of bounds", _class_out_of_bounds),
    (
        r"fail_on_recompile_limit_hit",
        "A compiled model is compiled for each shape of a batch. Pad batches to a few shapes, or set `compile: false`.",
    ),
    (
        r"backward through the graph a second time",
        "Compute what the loss depends on anew in each call of loss(), or .detach() what is kept.",
    ),
)
