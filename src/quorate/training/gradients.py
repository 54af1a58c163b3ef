"""Gradients in flat buffers: one set per hosted lane, and one for their sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quorate.core.errors import UnsupportedModelError
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.reduce.memory import GradientMemory


@dataclass(frozen=True)
class FlatTensors:
    """Buckets of memory, and a view into them for each parameter."""

    buckets: tuple[torch.Tensor, ...]
    views: tuple[torch.Tensor, ...]

    @classmethod
    def over(
        cls, buckets: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter], plan: Sequence[Bucket]
    ) -> "FlatTensors":
        """These parameters in buckets of memory, laid out by the plan."""
        views: dict[int, torch.Tensor] = {}
        for bucket, flat in zip(plan, buckets, strict=True):
            for slot in bucket.slots:
                part = flat[slot.offset : slot.offset + slot.numel]
                views[slot.index] = part.view(parameters[slot.index].shape)
        return cls(tuple(buckets), tuple(views[i] for i in range(len(parameters))))


class Gradients:
    """Collects each lane's gradient while its backward pass runs, and hands the sum to the optimizer.

    Before a lane's first backward pass every `.grad` is None, as in plain PyTorch, so that the first gradient is
    taken as it is (adding it to zeros would turn −0.0 into 0.0) and a parameter that gets none keeps None. A hook
    then moves it into the lane's buffer, where later micro-batches add to it.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], plan: Sequence[Bucket], memory: GradientMemory
    ) -> None:
        self.names = tuple(name for name, _ in parameters)
        self.parameters = tuple(parameter for _, parameter in parameters)
        self.plan = plan
        self.lanes = {lane: self._over(buckets) for lane, buckets in memory.lanes.items()}
        self.total = self._over(memory.total)
        self._writes_are_dear = memory.writes_are_dear
        self._writable: FlatTensors | None = None
        self._current = self.total
        self._touched: set[int] = set()
        self._in_backward = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._adopt(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]

    def begin(self, lane: int) -> None:
        """Collect for this lane from now on."""
        for parameter in self.parameters:
            parameter.grad = None
        self._current = self.lanes[lane]
        self._touched = set()

    def backward(self, loss: torch.Tensor, weight: float, inputs: list[torch.Tensor] | None, retain: bool) -> None:
        """One weighted backward pass; with `inputs`, only they get gradients."""
        self._in_backward = True
        try:
            # The weight enters as the loss's own gradient: each addition on the ring is then a plain sum.
            torch.autograd.backward(loss, torch.full_like(loss, weight), retain_graph=retain, inputs=inputs)
        finally:
            self._in_backward = False

    def finish(self) -> int:
        """End of the lane; which parameters have a gradient, as bits."""
        bits = 0
        for index, view in enumerate(self._current.views):
            if index not in self._touched:
                view.zero_()
                continue
            bits |= 1 << index
            if self.parameters[index].grad is not view:
                raise self._detached(index)
        return bits

    def clear(self, lane: int) -> None:
        """A lane without samples counts as zeros."""
        for bucket in self.lanes[lane].buckets:
            bucket.zero_()

    def install(self, present: int, to_be_written: bool = False) -> None:
        """Give the sum to the parameters; those without a gradient in any lane keep None."""
        views = self._copied().views if to_be_written and self._writes_are_dear else self.total.views
        for index, parameter in enumerate(self.parameters):
            parameter.grad = views[index] if present >> index & 1 else None

    def total_norm(self) -> float:
        """The norm of the sum. What has no gradient counts as zeros."""
        norms = [torch.linalg.vector_norm(bucket) for bucket in self.total.buckets]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
        return float(norm)

    def close(self) -> None:
        """Let the parameters go."""
        for hook in self._hooks:
            hook.remove()

    def _over(self, buckets: Sequence[torch.Tensor]) -> FlatTensors:
        return FlatTensors.over(buckets, self.parameters, self.plan)

    def _copied(self) -> FlatTensors:
        """The sum in memory where it costs little to write to it."""
        if self._writable is None:
            self._writable = self._over([torch.empty_like(bucket) for bucket in self.total.buckets])
        for copy, bucket in zip(self._writable.buckets, self.total.buckets, strict=True):
            copy.copy_(bucket)
        return self._writable

    def _adopt(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient, view = parameter.grad, self._current.views[index]
            if gradient is view:
                return
            if gradient is None or index in self._touched:
                raise self._detached(index)
            self._check(index, gradient)
            view.copy_(gradient)
            parameter.grad = view
            self._touched.add(index)

        return hook

    def _check(self, index: int, gradient: torch.Tensor) -> None:
        name = self.names[index]
        if not self._in_backward:
            raise UnsupportedModelError(
                f"The gradient of '{name}' was computed inside loss(): loss() must not call backward() itself. "
                "Return the loss, or a dict of losses by optimizer; for gradients within it use torch.autograd.grad."
            )
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

    def _detached(self, index: int) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"The gradient of '{self.names[index]}' was detached from its buffer between two backward passes of a "
            "lane: loss() or the model replaced its `.grad`, as zero_grad() does. Leave `.grad` to Quorate."
        )


def gradient_plan(parameters: Sequence[tuple[str, torch.nn.Parameter]], bucket_mb: float) -> tuple[Bucket, ...]:
    """The buckets in which the gradients of these parameters are exchanged."""
    shapes = [
        TensorShape(name, str(parameter.dtype), parameter.element_size(), parameter.numel())
        for name, parameter in parameters
    ]
    return plan_buckets(shapes, bucket_mb)
