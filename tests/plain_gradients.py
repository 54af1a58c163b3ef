"""Gradients in the memory of one process."""

from collections.abc import Sequence

from torch.nn import Parameter

from quorate.reduce.memory import PlainMemory
from quorate.training.gradients import Gradients, gradient_plan


def plain_gradients(parameters: Sequence[tuple[str, Parameter]], lanes: range, bucket_mb: float = 25.0) -> Gradients:
    plan = gradient_plan(parameters, bucket_mb)
    return Gradients(parameters, plan, PlainMemory.of(plan, lanes))
