"""Gradients in the memory of one process."""

from collections.abc import Sequence

from torch.nn import Parameter

from quorate.collectives.memory import GradientMemory
from quorate.replica.flat_gradients import FlatGradients
from quorate.replica.gradients import gradient_plan


def plain_gradients(
    parameters: Sequence[tuple[str, Parameter]], lanes: range, bucket_mb: float = 25.0
) -> FlatGradients:
    plan = gradient_plan(parameters, bucket_mb)
    return FlatGradients(parameters, plan, GradientMemory.of_process(plan, lanes))
