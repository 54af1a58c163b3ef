"""What the loop asks of gradients, whoever keeps them; and what is refused of them."""

from collections.abc import Sequence
from typing import Protocol

import torch

from quorate.core.errors import UnsupportedModelError
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.reduce.reduction import Reduction
from quorate.training.device import Device


class Gradients(Protocol):
    """Collects each hosted lane's gradient, and hands the sum over all lanes to the optimizer."""

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """What has gradients."""
        ...

    @property
    def sums(self) -> int:
        """How many sums make up an exchange."""
        ...

    def begin(self, lane: int) -> None:
        """Collect for this lane from now on."""
        ...

    def backward(
        self,
        loss: torch.Tensor,
        weight: float,
        inputs: list[torch.Tensor] | None = None,
        *,
        retain: bool = False,
        is_last: bool = False,
    ) -> None:
        """One weighted backward pass; with `inputs`, only they get gradients. `is_last`: the lane has no other."""
        ...

    def finish(self) -> int:
        """End of the lane; which parameters have a gradient, as bits."""
        ...

    def clear(self, lane: int) -> None:
        """A lane without samples counts as zeros."""
        ...

    def sum_over(self, step: int, reduction: Reduction) -> None:
        """Sum what all lanes have collected."""
        ...

    def install(self, present: int, to_be_written: bool = False) -> None:
        """Give the sum to the parameters; those without a gradient in any lane keep None."""
        ...

    def total_norm(self, device: Device) -> float:
        """The norm of the sum."""
        ...

    def close(self) -> None:
        """Let the parameters go."""
        ...


def gradient_plan(parameters: Sequence[tuple[str, torch.nn.Parameter]], bucket_mb: float) -> tuple[Bucket, ...]:
    """The buckets in which the gradients of these parameters are exchanged."""
    shapes = [
        TensorShape(name, str(parameter.dtype), parameter.element_size(), parameter.numel())
        for name, parameter in parameters
    ]
    return plan_buckets(shapes, bucket_mb)


def check_gradient(name: str, gradient: torch.Tensor) -> None:
    """Refuse what cannot be summed."""
    if gradient.layout is not torch.strided:
        raise UnsupportedModelError(
            f"The gradient of '{name}' is sparse ({gradient.layout}), which the ring does not sum. "
            "Build the layer with sparse=False."
        )
    if gradient.requires_grad:
        raise UnsupportedModelError(
            f"The gradient of '{name}' carries a graph of its own (create_graph) and so cannot stay in its buffer. "
            "Use torch.autograd.grad(..., create_graph=True) for gradients within loss()."
        )


def computed_inside(name: str) -> UnsupportedModelError:
    """There is a gradient where no backward pass of ours has been."""
    return UnsupportedModelError(
        f"The gradient of '{name}' was computed inside loss(): loss() must not call backward() itself. "
        "Return the loss, or a dict of losses by optimizer; for gradients within it use torch.autograd.grad."
    )


def detached(name: str) -> UnsupportedModelError:
    """A gradient is not where it was left."""
    return UnsupportedModelError(
        f"The gradient of '{name}' was detached from its buffer between two backward passes of a "
        "lane: loss() or the model replaced its `.grad`, as zero_grad() does. Leave `.grad` to Quorate."
    )


def sent_before(name: str) -> UnsupportedModelError:
    """A gradient has changed after it was taken for complete."""
    return UnsupportedModelError(
        f"The gradient of '{name}' was added to after it had been sent: a backward pass reaches it more than once, "
        "as with reentrant checkpointing. Set `overlap: false` in the job file."
    )
