"""The gradients of a gang: a worker's lanes add up in `.grad`, and a reducer sums them over the workers."""

from collections.abc import Sequence
from operator import attrgetter

import torch

from quorate.core.errors import UnsupportedModelError
from quorate.strategies.gangs.ddp_reducer import DdpReducer
from quorate.training.gradients import LoneGradients

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
        self._hosted = hosted
        self._lane = hosted.start
        self._reducer = reducer
        self._overlaps = overlaps
        self._in_turns = in_turns

    def begin(self, lane: int) -> None:
        self._lane = lane
        if lane == self._hosted.start:
            super().begin(lane)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor,
        inputs: list[torch.Tensor] | None = None,
        *,
        retain: bool = False,
        is_last: bool = False,
    ) -> None:
        if self._reducer is not None and self._overlaps and is_last and self._is_last_lane:
            self._reducer.arm()
        super().backward(loss, weight, inputs, retain=retain, is_last=is_last)

    def take(self, gradients: Sequence[torch.Tensor | None], *, is_last: bool) -> None:
        super().take(gradients, is_last=is_last and self._is_last_lane)

    @property
    def _is_last_lane(self) -> bool:
        return self._lane == self._hosted.stop - 1

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
