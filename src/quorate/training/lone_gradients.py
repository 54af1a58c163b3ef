"""The gradients of a job with a single lane: there is nothing to sum, so they stay where autograd puts them."""

import math
from collections.abc import Sequence

import torch

from quorate.reduce.reduction import Reduction
from quorate.training.backward import run_backward
from quorate.training.device import Device
from quorate.training.gradients import check_gradient, computed_inside, detached


class LoneGradients:
    """What plain PyTorch does, and a watch over user code that would interfere with it."""

    sums = 0

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._names = tuple(name for name, _ in parameters)
        self.parameters = tuple(parameter for _, parameter in parameters)
        self._left: list[torch.Tensor | None] = [None] * len(self.parameters)

    def begin(self, lane: int) -> None:  # noqa: ARG002
        """Collect from now on."""
        for parameter in self.parameters:
            parameter.grad = None
        self._left = [None] * len(self.parameters)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float,
        inputs: list[torch.Tensor] | None = None,
        *,
        retain: bool = False,
        is_last: bool = False,  # noqa: ARG002
    ) -> None:
        """One weighted backward pass; with `inputs`, only they get gradients."""
        self._check_left_alone()
        run_backward(loss, weight, inputs, retain)
        self._left = [parameter.grad for parameter in self.parameters]

    def finish(self) -> int:
        """End of the lane; which parameters have a gradient, as bits."""
        self._check_left_alone()
        bits = 0
        for index, gradient in enumerate(self._left):
            if gradient is not None:
                check_gradient(self._names[index], gradient)
                bits |= 1 << index
        return bits

    def clear(self, lane: int) -> None:
        """A lane without samples has no gradient: all of them are bad, and the step is left out."""
        self.begin(lane)

    def sum_over(self, step: int, reduction: Reduction) -> None:
        """The only term is the sum."""

    def install(self, present: int, to_be_written: bool = False) -> None:
        """They are in their places."""

    def total_norm(self, device: Device) -> float:
        """The norm of all of them."""
        gradients = [gradient for gradient in self._left if gradient is not None]
        norms = torch._foreach_norm(gradients) if gradients else ()
        return math.hypot(*device.numbers(norms)())

    def close(self) -> None:
        """Let the parameters go."""
        self._left = []

    def _check_left_alone(self) -> None:
        for index, (parameter, left) in enumerate(zip(self.parameters, self._left, strict=True)):
            if parameter.grad is not left:
                raise computed_inside(self._names[index]) if left is None else detached(self._names[index])
