"""Gradients of embeddings that were built with sparse=True: of each lane the rows that it has touched.

Parameter servers take them; the ring has none. `sparse=True` is a meaning of its own: a row is summed over the lanes
that have it, in lane order, and a row that no lane has is left alone, by the optimizer too.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from quorate.core.errors import UnsupportedModelError
from quorate.lanes.buckets import Bucket
from quorate.reduce.memory import GradientMemory
from quorate.strategies.servers.rows import Rows
from quorate.training.flat_gradients import FlatGradients
from quorate.training.gradients import detached


def check_row_optimizers(
    optimizers: Mapping[str, Optimizer], trainable: Sequence[tuple[str, nn.Parameter]], by_rows: Collection[int]
) -> None:
    """Refuse an optimizer that cannot use sparse gradients, or changes rows which have none: only rows that have one
    are sent to the workers."""
    names = {id(trainable[index][1]): trainable[index][0] for index in by_rows}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            name = next((names[id(parameter)] for parameter in group["params"] if id(parameter) in names), None)
            if name is not None and (why := _unfit(optimizer, group)):
                raise UnsupportedModelError(
                    f"'{name}' has sparse gradients (sparse=True), and {why}. Use SGD without momentum, SparseAdam or "
                    "Adagrad for it, without weight decay, or build the layer with sparse=False."
                )


def _unfit(optimizer: Optimizer, group: Mapping[str, object]) -> str:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, (SGD, SparseAdam, Adagrad)):
        return f"{kind} takes none"
    settings = [name for name in ("momentum", "weight_decay") if group.get(name)]
    return f"{settings[0]} of {kind} changes rows that have no gradient" if settings else ""


class RowGradients(FlatGradients):
    """Flat gradients in which some parameters, by their index, have sparse ones: those are in `rows`, by lane."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        plan: Sequence[Bucket],
        memory: GradientMemory,
        by_rows: Collection[int],
        *,
        as_they_lie: bool = False,
    ) -> None:
        self.by_rows = frozenset(by_rows)
        self._left: dict[int, torch.Tensor] = {}
        self._lane = -1
        super().__init__(parameters, plan, memory, as_they_lie=as_they_lie)
        self.rows: dict[int, dict[int, Rows]] = {lane: {} for lane in self.lanes}

    def begin(self, lane: int) -> None:
        super().begin(lane)
        self._lane = lane
        self._left.clear()
        self.rows[lane] = {}

    def beside(self) -> dict[int, tuple[torch.Tensor, ...]]:
        return {index: (some.indices, some.values) for index, some in self.rows.get(self._lane, {}).items()}

    def finish(self) -> int:
        bits = super().finish()
        for index, gradient in self._left.items():
            self.rows[self._lane][index] = Rows.of_gradient(gradient)
            self.parameters[index].grad = None  # else it would be kept twice
        self._left.clear()
        return bits

    def _take(self, index: int) -> torch.Tensor | None:
        if index not in self.by_rows:
            return super()._take(index)
        gradient = self.parameters[index].grad
        if gradient is not None:
            if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
                raise UnsupportedModelError(
                    f"The gradient of '{self.names[index]}' is dense, though its layer was built with sparse=True: the "
                    "weights are used elsewhere, too. Build the layer with sparse=False."
                )
            self._left[index] = gradient
            self._touched.add(index)
        return None

    def _is_left(self, index: int) -> bool:
        if index not in self.by_rows:
            return super()._is_left(index)
        return self.parameters[index].grad is self._left.get(index)

    def _check_left_alone(self) -> None:
        super()._check_left_alone()
        for index in self._left:
            if not self._is_left(index):
                raise detached(self.names[index])
