"""The gradients of a gang: a worker's lanes add up in `.grad`, and DDP's own reducer sums them over the workers.

`DistributedDataParallel` is a module around this reducer, which calls it before and after `forward`. Quorate calls
`loss()`, which may call the model several times or a part of it, so here the reducer is told directly: by `arm` that
the next backward pass is the last of the step, and by `complete` that there is no other. So the model is not wrapped.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket, Reducer, _register_comm_hook

from quorate.core.errors import UnsupportedModelError
from quorate.lanes.buckets import MEBIBYTE, Bucket
from quorate.replica.gradients import LoneGradients
from quorate.strategies.gangs.process_group import ProcessGroup

_TWICE = "marked as ready"
"""What torch says of a parameter whose gradient is in its bucket already."""


class BucketSums:
    """Sums buckets, each in its place, as they are or rounded to a smaller type, in which they are added up too.

    Summed, not averaged: lanes have weighted their gradients.
    """

    def __init__(self, group: ProcessGroup, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.all_begun = False
        self._group = group
        self._rounded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, bucket: torch.Tensor) -> None:
        """A bucket is full. The backward pass, which calls this, is not to wait for its sum."""
        sent = bucket
        if self.dtype is not None:
            sent = bucket.to(self.dtype)
            self._rounded.append((bucket, sent))
        self._group.begin_sum(sent)

    def finish(self) -> None:
        """Return when all buckets that were begun are the sums. Whoever waits here can be interrupted."""
        self._group.wait()
        for bucket, rounded in self._rounded:
            bucket.copy_(rounded)
        self._rounded.clear()


def _begin_sum(sums: BucketSums, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The sum is formed in the bucket's place: so that is given at once, and `DdpReducer.wait` says when it is true."""
    buffer = bucket.buffer()
    sums.begin(buffer)
    sums.all_begun = bucket.is_last()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if buffer.device.type == "cpu" else [buffer.device]
    )
    future.set_result(buffer)
    return future


class DdpReducer:
    """Collects gradients in buckets during the last backward pass of a step, and sums each as soon as it is full.

    Gradients become views of the buckets. Which buckets there are depends on the parameters alone: left to itself, the
    reducer would cut others after its first pass, and a gang that begins again would have other bits.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        plan: Sequence[Bucket],
        bucket_mb: float,
        group: ProcessGroup,
        sums: BucketSums,
    ) -> None:
        size = max(1, round(bucket_mb * MEBIBYTE))
        self._parameters = parameters
        self._order = [slot.index for bucket in plan for slot in bucket.slots]
        self._sums, dtype = sums, sums.dtype
        self._is_armed = False
        self._reducer: Any = Reducer(
            params=list(parameters),
            bucket_indices=[[slot.index for slot in bucket.slots] for bucket in plan],
            per_bucket_size_limits=[size] * len(plan),
            process_group=group.group,
            bucket_bytes_cap=size,
            first_bucket_bytes_cap=size,  # type: ignore[call-arg]
            gradient_as_bucket_view=True,
        )
        # Not this object, which would keep itself alive.
        _register_comm_hook(self._reducer, sums, _begin_sum)
        # A pass that nobody sees, in the order of the plan: by its order the reducer cuts the buckets that it keeps.
        sums.dtype = None
        self.complete()
        self.wait()
        try:
            self._reducer._rebuild_buckets()
        except RuntimeError as error:
            raise group.translated(error) from None
        for parameter in parameters:
            parameter.grad = None
        sums.dtype = dtype

    def arm(self) -> None:
        """The backward pass that comes next is the last of this step."""
        self._sums.all_begun = False
        self._is_armed = True
        self._reducer.prepare_for_backward([])

    def complete(self) -> None:
        """No gradient of this step is still to come: whatever the last pass has not reached is taken as it is, so that
        nobody waits for it. Without a last pass, that is everything."""
        if not self._is_armed:
            self.arm()
        if not self._sums.all_begun:
            with torch.enable_grad():
                rest = _TakeRest.apply(torch.zeros((), requires_grad=True), self._take_rest)  # type: ignore[no-untyped-call]
                rest.backward()
        self._is_armed = False

    def wait(self) -> None:
        """Return when the sums are in the gradients' places."""
        self._sums.finish()

    def close(self) -> None:
        """Take the hooks from the parameters. The process group is somebody else's."""
        self._reducer = None

    def _take_rest(self) -> None:
        for index in self._order:
            try:
                self._reducer._autograd_hook(index)
            except RuntimeError as error:
                if _TWICE not in str(error):
                    raise


class _TakeRest(torch.autograd.Function):
    """The reducer finishes with the backward pass in which its last bucket is filled, so it needs one."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, take: Any) -> torch.Tensor:
        context.take = take
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.take()
        return gradient, None


_GRADIENT = attrgetter("grad")


class GangGradients(LoneGradients):
    """Hosted lanes are accumulated like micro-batches, in lane order. `reducer`: None for a worker that is alone.

    `overlaps`: sums begin while the last backward pass runs. Not where several losses have a pass each, as every
    optimizer's parameters then have a pass of their own. `in_turns`: workers need each other in every pass.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        hosted: range,
        reducer: DdpReducer | None,
        *,
        overlaps: bool,
        in_turns: bool = False,
    ) -> None:
        super().__init__(parameters)
        self.hosted = hosted
        self._lane = hosted.start
        self._reducer = reducer
        self._overlaps = overlaps
        self._in_turns = in_turns

    def begin(self, lane: int) -> None:
        self._lane = lane
        if lane == self.hosted.start:
            super().begin(lane)

    def begin_pass(self, *, is_last: bool = False) -> None:
        if self._reducer is not None and self._overlaps and is_last and self._is_last_lane:
            self._reducer.arm()
        super().begin_pass(is_last=is_last)

    def take(self, gradients: Sequence[torch.Tensor | None], *, is_last: bool) -> None:
        super().take(gradients, is_last=is_last and self._is_last_lane)

    @property
    def _is_last_lane(self) -> bool:
        return self._lane == self.hosted.stop - 1

    def clear(self, lane: int) -> None:
        """A lane without samples adds nothing."""
        if self._in_turns:
            raise UnsupportedModelError(
                f"Lane {lane} has no samples in this step, and with strategy.sync_batch_norm the others wait for it. "
                "Use fewer lanes or larger batches, or leave sync_batch_norm out."
            )
        self.begin(lane)

    def abandon(self, lane: int) -> None:  # noqa: ARG002
        """What it has left stays: its step counts for nothing, and the next begins without."""
        self._left = list(map(_GRADIENT, self.parameters))

    def exchange(self) -> None:
        """Sum over all workers what the hosted lanes have left. All of them call it, once in a step."""
        if self._reducer is not None:
            self._reducer.complete()
            self._reducer.wait()

    def install(self, present: int, to_be_written: bool = False) -> None:  # noqa: ARG002
        for index, parameter in enumerate(self.parameters):
            if not present >> index & 1:
                parameter.grad = None
        self._left = list(map(_GRADIENT, self.parameters))

    def close(self) -> None:
        super().close()
        self.drop()  # views of the reducer's buckets
        if self._reducer is not None:
            self._reducer.close()
