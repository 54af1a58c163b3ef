"""What the strategies that compress gradients have in common: the method of a job, and what its lanes hold back."""

from collections.abc import Sequence

import torch

from quorate.core.errors import UnsupportedModelError
from quorate.lanes.buckets import Bucket
from quorate.spec.job import JobSpec
from quorate.strategies.compression.compressor import Method
from quorate.strategies.compression.eight_bits import EightBits
from quorate.strategies.compression.option import CompressSpec, lane_compression
from quorate.strategies.compression.residuals import Residuals
from quorate.strategies.compression.top_k import TopK


def check_compressible(parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse what has gradients that are no floating-point numbers, or in which nothing is left to round."""
    for name, parameter in parameters:
        if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"'{name}' is of type {parameter.dtype}, whose gradient cannot be compressed. "
                "Leave strategy.compress out."
            )


def method_of(compress: CompressSpec) -> Method:
    """What a job takes of a gradient."""
    return EightBits() if compress.top_k is None else TopK(compress.top_k)


def residuals_of(spec: JobSpec, plan: Sequence[Bucket], descriptor: int | None = None) -> Residuals | None:
    """What a job's lanes hold back, in the memory that this descriptor is of; None where they hold nothing back."""
    compress = lane_compression(spec.strategy)
    return Residuals(plan, spec.lanes, descriptor) if compress is not None and compress.feedback else None
