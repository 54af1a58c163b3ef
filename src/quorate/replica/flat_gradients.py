"""Gradients in flat buffers that can be summed over lanes: one set per hosted lane, and one for their sum."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from quorate.collectives.memory import GradientMemory
from quorate.data.collate import is_dense
from quorate.lanes.buckets import Bucket
from quorate.replica.gradients import (
    Gradients,
    cannot_be_summed,
    computed_inside,
    detached,
    sent_before,
)

LARGE = 256 * 2**10
"""Bytes from which a gradient is moved by a hook of its own."""


@dataclass(frozen=True)
class FlatTensors:
    """Buckets of memory, and a view into them for each parameter."""

    buckets: tuple[torch.Tensor, ...]
    views: tuple[torch.Tensor, ...]


def shaped(flat: torch.Tensor, parameter: torch.Tensor, *, as_they_lie: bool) -> torch.Tensor:
    """A flat tensor as one like the parameter: by its strides, or by the order of indices."""
    if as_they_lie and is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def flattened(parameter: torch.Tensor, *, as_they_lie: bool) -> torch.Tensor:
    """The reverse; a copy where the order of indices is not that of memory."""
    if as_they_lie and is_dense(parameter):
        return parameter.detach().as_strided((parameter.numel(),), (1,))
    return parameter.detach().reshape(-1)


class FlatGradients(Gradients):
    """Collects each lane's gradient while its backward pass runs, and hands the sum to the optimizer.

    Before a lane's first backward pass every `.grad` is None, as in plain PyTorch, so that the first gradient is
    taken as it is (adding it to zeros would turn −0.0 into 0.0) and a parameter that gets none keeps None. It is then
    moved into the lane's buffer, where later micro-batches add to it: a large one by a hook, at once, so that its
    memory is free for the next; small ones together after the pass, since a hook for each costs more than its copy.

    `as_they_lie`: with the strides of the parameters, which fused optimizers ask for. A bucket then holds the elements
    in the order of memory: the same in every worker, but not that of the indices.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        plan: Sequence[Bucket],
        memory: GradientMemory,
        *,
        as_they_lie: bool = False,
    ) -> None:
        super().__init__(parameters)
        self._as_they_lie = as_they_lie
        self.plan = plan
        self.lanes = {lane: self._over(memory.lanes[lane]) for lane in sorted(memory.lanes)}
        self.total = self._over(memory.total)
        self._writes_are_slow = memory.writes_are_slow
        self._writable: FlatTensors | None = None
        self._last = self.lanes[max(self.lanes)]
        self._current = self._last
        self._touched: set[int] = set()
        self._readiness: _Readiness | None = None
        self._in_backward = False
        self._in_last_backward = False
        self._is_aside = False
        self._hooks: dict[int, RemovableHandle] = {}
        self._hook(index for index, parameter in enumerate(self.parameters) if parameter.nbytes >= LARGE)

    def announce(self, ready: Callable[[int], None]) -> None:
        """Call `ready` with each bucket, in the order of the plan, as soon as the last hosted lane has filled it."""
        self._readiness = _Readiness(self.plan, ready)
        self._hook(range(len(self.parameters)))

    @property
    def sums(self) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        """Each bucket of the hosted lanes, in their order, and that of the sum."""
        lanes = [flat.buckets for flat in self.lanes.values()]
        return [([each[index] for each in lanes], total) for index, total in enumerate(self.total.buckets)]

    @property
    def latest(self) -> FlatTensors:
        """Those of the lane that was begun last."""
        return self._current

    def beside(self) -> dict[int, tuple[torch.Tensor, ...]]:
        """What the latest lane has of parameters that have no place in the buckets, by their index."""
        return {}

    def begin(self, lane: int) -> None:
        self.drop()
        self._current = self.lanes[lane]
        self._in_backward = self._in_last_backward = False  # of a pass that was broken off
        self._touched.clear()
        if self._readiness is not None:
            self._readiness.begin()

    def begin_pass(self, *, is_last: bool = False) -> None:
        self.check_left_alone()
        self._in_backward, self._in_last_backward = True, is_last

    def end_pass(self) -> None:
        self._in_backward = self._in_last_backward = False
        gradients, views = [], []
        for index in self._unhooked:
            gradient = self._take(index)
            if gradient is not None:
                gradients.append(gradient)
                views.append(self._current.views[index])
        if views:
            torch._foreach_copy_(views, gradients)

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._is_aside = True
        try:
            with super().aside():
                yield
        finally:
            self._is_aside = False

    def take(self, gradients: Sequence[torch.Tensor | None], *, is_last: bool) -> None:  # noqa: ARG002
        self.check_left_alone()
        views, copied, sums, added = [], [], [], []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            view = self._current.views[index]
            if index not in self._touched:
                self._touched.add(index)
                self.parameters[index].grad = view
                views.append(view)
                copied.append(gradient)
            elif not self._is_left(index):
                raise detached(self.names[index])
            else:
                sums.append(view)
                added.append(gradient)
        if views:
            torch._foreach_copy_(views, copied)
        if sums:
            torch._foreach_add_(sums, added)

    def finish(self) -> int:
        bits = 0
        for index, view in enumerate(self._current.views):
            if index not in self._touched:
                view.zero_()
                continue
            bits |= 1 << index
            if not self._is_left(index):
                raise detached(self.names[index])
        if self._readiness is not None:
            self._announce_rest()
        return bits

    def clear(self, lane: int) -> None:
        self.begin(lane)
        for bucket in self._current.buckets:
            bucket.zero_()
        self._announce_rest()

    def abandon(self, lane: int) -> None:
        """What was announced of it already is on its way, and is not announced a second time."""
        self.drop()
        self._in_backward = self._in_last_backward = False
        self._touched.clear()
        for bucket in self.lanes[lane].buckets:
            bucket.zero_()
        self._announce_rest()

    def install(self, present: int, to_be_written: bool = False) -> None:
        views = self._copied().views if to_be_written and self._writes_are_slow else self.total.views
        for index, parameter in enumerate(self.parameters):
            parameter.grad = views[index] if present >> index & 1 else None

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._readiness = None
        super().close()

    def _over(self, buckets: Sequence[torch.Tensor]) -> FlatTensors:
        views: dict[int, torch.Tensor] = {}
        for bucket, flat in zip(self.plan, buckets, strict=True):
            for slot in bucket.slots:
                parameter, part = self.parameters[slot.index], flat[slot.offset : slot.offset + slot.numel]
                is_whole = slot.numel == parameter.numel()
                views[slot.index] = shaped(part, parameter, as_they_lie=self._as_they_lie) if is_whole else part
        return FlatTensors(tuple(buckets), tuple(views[i] for i in range(len(self.parameters))))

    def _copied(self) -> FlatTensors:
        """The sum in memory where it costs little to write to it."""
        if self._writable is None:
            self._writable = self._over([torch.empty_like(bucket) for bucket in self.total.buckets])
        for copy, bucket in zip(self._writable.buckets, self.total.buckets, strict=True):
            copy.copy_(bucket)
        return self._writable

    def _hook(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index not in self._hooks:
                hook = partial(self._collect_at_once, index)
                self._hooks[index] = self.parameters[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._unhooked = [index for index in range(len(self.parameters)) if index not in self._hooks]

    def _collect_at_once(self, index: int, _: torch.Tensor) -> None:
        if self._is_aside:
            return
        gradient, view = self._take(index), self._current.views[index]
        if gradient is not None:
            view.copy_(gradient)
        is_complete = self._in_last_backward and self._tells and index in self._touched
        if self._readiness is not None and is_complete and not self._readiness.complete(index):
            raise sent_before(self.names[index])

    def _take(self, index: int) -> torch.Tensor | None:
        """A gradient that is not in its buffer yet; from now on what is added to it is added there."""
        parameter, view = self.parameters[index], self._current.views[index]
        gradient = parameter.grad
        if gradient is view:
            return None
        if index in self._touched:
            raise detached(self.names[index])
        if gradient is None:
            return None
        if index in self._hooks and not self._in_backward:
            raise computed_inside(self.names[index])
        if gradient.layout is not torch.strided or gradient.requires_grad:
            raise cannot_be_summed(self.names[index], gradient)
        parameter.grad = view
        self._touched.add(index)
        return gradient

    def _is_left(self, index: int) -> bool:
        """Whether a gradient is where the backward pass has left it."""
        return self.parameters[index].grad is self._current.views[index]

    def _announce_rest(self) -> None:
        if self._readiness is not None and self._tells:
            self._readiness.complete_all()

    @property
    def _tells(self) -> bool:
        return self._current is self._last and self.announces

    def check_left_alone(self) -> None:
        """Raise where user code has computed a gradient."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and index not in self._touched:
                raise computed_inside(self.names[index])


class _Readiness:
    """Which buckets are complete, while the backward pass still fills the others.

    Announces them in the order of the plan, each once: all workers must sum them in the same order.
    """

    def __init__(self, plan: Sequence[Bucket], announce: Callable[[int], None]) -> None:
        self._bucket_of = {slot.index: number for number, bucket in enumerate(plan) for slot in bucket.slots}
        self._contents = [frozenset(slot.index for slot in bucket.slots) for bucket in plan]
        self._announce = announce
        self.begin()

    def begin(self) -> None:
        self._missing = [set(content) for content in self._contents]
        self._announced = 0

    def complete(self, index: int) -> bool:
        """The gradient of this parameter is in its place. False if that place has been announced already."""
        number = self._bucket_of[index]
        if number < self._announced:
            return False
        # By name, not by number: reentrant checkpointing tells of one parameter as often as it is used.
        self._missing[number].discard(index)
        self._announce_while(lambda missing: not missing)
        return True

    def complete_all(self) -> None:
        self._announce_while(lambda _: True)

    def _announce_while(self, is_ready: Callable[[set[int]], bool]) -> None:
        while self._announced < len(self._missing) and is_ready(self._missing[self._announced]):
            self._announced += 1
            self._announce(self._announced - 1)
