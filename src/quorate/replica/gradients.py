"""What the loop asks of gradients, whoever keeps them; those of a job with one lane; and what is refused."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_

import torch
from torch.autograd.graph import _engine_run_backward
from torch.nn.utils import clip_grad_norm_, get_total_norm

from quorate.core.errors import UnsupportedModelError
from quorate.lanes.buckets import ALIGNMENT, Bucket, TensorShape, plan_buckets
from quorate.replica.device import Device

_GRADIENT = attrgetter("grad")


class Gradients:
    """Collects each hosted lane's gradient, and hands the sum over all lanes to the optimizer. The strategy sums.

    `parameters` are what has gradients. It `announces` what it has collected of the last lane, where somebody waits for
    that; not while another lane is computed in its place.
    """

    announces = True

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.names = tuple(name for name, _ in parameters)
        self.parameters = tuple(parameter for _, parameter in parameters)

    def begin(self, lane: int) -> None:
        """Collect for this lane from now on."""
        raise NotImplementedError

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor,
        inputs: list[torch.Tensor] | None = None,
        *,
        retain: bool = False,
        is_last: bool = False,
    ) -> None:
        """One weighted backward pass; with `inputs`, only they get gradients. `is_last`: the lane has no other."""
        self.begin_pass(is_last=is_last)
        run_backward(loss, weight, inputs, retain)
        self.end_pass()

    def begin_pass(self, *, is_last: bool = False) -> None:
        """Raise where something has a gradient but what the lane's passes before it have left, which user code must
        leave alone."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """Collect what a pass has left."""
        raise NotImplementedError

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Until its end nothing is collected: autograd leaves gradients where it would without us."""
        kept = list(map(_GRADIENT, self.parameters))
        self.drop()
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient

    def take(self, gradients: Sequence[torch.Tensor | None], *, is_last: bool) -> None:
        """Collect what was computed elsewhere, as a backward pass would have. Their memory is written to again by the
        next pass of a lane, and until then it may be written to here. `is_last`: the lane has no other."""
        raise NotImplementedError

    def finish(self) -> int:
        """End of the lane; which parameters have a gradient, as bits."""
        raise NotImplementedError

    def clear(self, lane: int) -> None:
        """A lane without samples counts as zeros."""
        self.begin(lane)

    def abandon(self, lane: int) -> None:
        """The same for a lane that has begun and cannot be completed: its step counts for nothing."""
        self.begin(lane)

    def install(self, present: int, to_be_written: bool = False) -> None:
        """Give the sum to the parameters; those without a gradient in any lane keep None."""
        raise NotImplementedError

    def total_norm(self, device: Device) -> float:
        """The norm of the sum."""
        return total_norm(norms_of([p.grad for p in self.parameters if p.grad is not None]), device)

    def norm(self) -> torch.Tensor:
        """The same, still on the device."""
        return norm_of(norms_of([p.grad for p in self.parameters if p.grad is not None]))

    def clipped_norm(self, parameters: Sequence[torch.Tensor], clip: float | None) -> torch.Tensor:
        """The norm of what these parameters have, which is scaled down to `clip` where it is above."""
        if clip is not None:
            return clip_grad_norm_(parameters, clip)
        return get_total_norm([p.grad for p in parameters if p.grad is not None])

    def close(self) -> None:
        """Let the parameters go."""
        self.drop()

    def drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class LoneGradients(Gradients):
    """The gradients of a single lane: there is nothing to sum, so they stay where autograd puts them. (One without
    samples has none: all of them are bad, and the step is left out.)

    User code that would interfere with that is refused.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__(parameters)
        self._left = self._none = list[torch.Tensor | None]([None] * len(self.parameters))

    def begin(self, lane: int) -> None:  # noqa: ARG002
        for parameter in self.parameters:
            parameter.grad = None
        self._left = self._none

    def begin_pass(self, *, is_last: bool = False) -> None:  # noqa: ARG002
        if not all(map(is_, map(_GRADIENT, self.parameters), self._left)):
            named = zip(self.names, self.parameters, self._left, strict=True)
            name, _, left = next(one for one in named if one[1].grad is not one[2])
            raise computed_inside(name) if left is None else detached(name)

    def end_pass(self) -> None:
        self._left = list(map(_GRADIENT, self.parameters))

    def take(self, gradients: Sequence[torch.Tensor | None], *, is_last: bool) -> None:
        self.begin_pass()
        sums, added = [], []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient if is_last else gradient.clone()
            else:
                sums.append(parameter.grad)
                added.append(gradient)
        if sums:
            torch._foreach_add_(sums, added)
        self._left = list(map(_GRADIENT, self.parameters))

    def finish(self) -> int:
        self.begin_pass()
        bits = 0
        for index, gradient in enumerate(self._left):
            if gradient is not None:
                if gradient.layout is not torch.strided or gradient.requires_grad:
                    raise cannot_be_summed(self.names[index], gradient)
                bits |= 1 << index
        return bits

    def install(self, present: int, to_be_written: bool = False) -> None:  # noqa: ARG002
        """They are in their places. One that is a part of something larger is not always where it would be by itself,
        and in which order a device adds up a norm depends on that: servers would find other last bits."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.data_ptr() % ALIGNMENT:
                parameter.grad = parameter.grad.clone()
        self._left = list(map(_GRADIENT, self.parameters))

    def close(self) -> None:
        """They stay for whoever looks at them after the last step."""
        self._left = []


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each by itself, type by type as `clip_grad_norm_` takes them: a device has other kernels for mixed ones."""
    dtypes = {one.dtype for one in gradients}
    if len(dtypes) == 1:
        return list(torch._foreach_norm(list(gradients)))
    norms: dict[int, torch.Tensor] = {}
    for dtype in dtypes:
        numbers = [number for number, one in enumerate(gradients) if one.dtype == dtype]
        norms |= zip(numbers, torch._foreach_norm([gradients[number] for number in numbers]), strict=True)
    return [norms[number] for number in range(len(gradients))]


def norm_of(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all gradients together, from that of each in the order of the parameters, on their device."""
    together = torch.stack([norm.float() for norm in norms]) if norms else torch.zeros(0)
    norm: torch.Tensor = torch.linalg.vector_norm(together)
    return norm


def total_norm(norms: Sequence[torch.Tensor], device: Device) -> float:
    """The same on the host, which has them at hand; elsewhere hundreds of numbers take longer to read than to add up.
    Not from whole buckets, which would be faster: servers have parts of them, and come to the same bits so."""
    if device.is_host:
        return math.hypot(*[norm.item() for norm in norms])
    return device.numbers([norm_of(norms)])()[0]


def run_backward(
    loss: torch.Tensor, weight: float | torch.Tensor, inputs: list[torch.Tensor] | None, retain: bool
) -> None:
    """One weighted pass: what `torch.autograd.backward` does with a scalar, without its checks of what is passed.

    They take a fifth of the pass of a small model. The weight enters as the loss's own gradient: each addition on the
    ring is then a plain sum.
    """
    if inputs is not None and not inputs:
        return  # an optimizer whose parameters are all frozen; to the engine, none would mean all
    _engine_run_backward(
        (loss,),
        (weight if isinstance(weight, torch.Tensor) else torch.full_like(loss, weight),),
        retain,
        False,  # no graph of the gradients
        tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def gradient_plan(
    parameters: Sequence[tuple[str, torch.nn.Parameter]], bucket_mb: float, by_rows: Collection[int] = ()
) -> tuple[Bucket, ...]:
    """The buckets in which the gradients of these parameters are exchanged. Those that are `by_rows`, by their index,
    have a place of no size: they travel by themselves."""
    shapes = [
        TensorShape(name, str(parameter.dtype), parameter.element_size(), 0 if index in by_rows else parameter.numel())
        for index, (name, parameter) in enumerate(parameters)
    ]
    return plan_buckets(shapes, bucket_mb)


def parameters_by_rows(model: torch.nn.Module, trainable: Sequence[tuple[str, torch.nn.Parameter]]) -> frozenset[int]:
    """Which of the trainable parameters get sparse gradients, by their index."""
    tables = {
        id(layer.weight)
        for layer in model.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }
    return frozenset(i for i, (_, parameter) in enumerate(trainable) if id(parameter) in tables and parameter.numel())


def refuse_rows(model: torch.nn.Module, trainable: Sequence[tuple[str, torch.nn.Parameter]], by: str) -> None:
    """Refuse sparse gradients by name, where what sums gradients has no rows: torch's own error names nothing."""
    if by_rows := parameters_by_rows(model, trainable):
        raise UnsupportedModelError(
            f"'{trainable[min(by_rows)][0]}' has sparse gradients (sparse=True), which `{by}` does not take. Use "
            "`strategy: parameter-server` with `mode: synchronous`, or build the layer with sparse=False."
        )


def check_compressible(parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse what has gradients that are no floating-point numbers, or in which nothing is left to round."""
    for name, parameter in parameters:
        if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"'{name}' is of type {parameter.dtype}, whose gradient cannot be compressed. "
                "Leave strategy.compress out."
            )


def cannot_be_summed(name: str, gradient: torch.Tensor) -> UnsupportedModelError:
    """A gradient is sparse, or carries a graph."""
    if gradient.layout is not torch.strided:
        return UnsupportedModelError(
            f"The gradient of '{name}' is sparse ({gradient.layout}), which the ring does not sum. "
            "Build the layer with sparse=False, or let servers hold it (`strategy: parameter-server`)."
        )
    return UnsupportedModelError(
        f"The gradient of '{name}' carries a graph of its own (create_graph) and so cannot stay in its buffer. "
        "Use torch.autograd.grad(..., create_graph=True) for gradients within loss()."
    )


def computed_inside(name: str) -> UnsupportedModelError:
    """There is a gradient where no backward pass of ours has been."""
    return UnsupportedModelError(
        f"The gradient of '{name}' was computed by the task itself: leave out backward(). Return the loss (in a loop "
        "of your own: run.step(loss)), or a dict of losses by optimizer; for gradients within it use "
        "torch.autograd.grad."
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
