"""Gradients by rows, of embeddings that were built with sparse=True: of each lane the rows that it has touched.

A row is summed over the lanes that have it, in lane order, which is a meaning of its own. A row that no lane has
is left alone, by the optimizer too. What travels follows the rows that are touched, not the size of a table.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from quorate.collectives.memory import GradientMemory
from quorate.core.errors import FrameError, UnsupportedModelError
from quorate.lanes.buckets import Bucket
from quorate.replica.flat_gradients import FlatGradients
from quorate.replica.gradients import detached
from quorate.strategies.servers.links import Spokes
from quorate.wire.link import Tag

COUNT_CHANNEL = 10
INDEX_CHANNEL = 11
VALUE_CHANNEL = 12

_HOST = torch.device("cpu")
_PUBLISHED = 2**32
"""Added to the numbers of what servers give out, which has no lane."""


@dataclass(frozen=True)
class Table:
    """What all members know of a parameter that has gradients by rows."""

    rows: int
    shape: tuple[int, ...]
    """Of one row."""
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "Table":
        return cls(parameter.shape[0], tuple(parameter.shape[1:]), parameter.dtype)

    @property
    def index_dtype(self) -> torch.dtype:
        """In which the numbers of rows travel."""
        return torch.int32 if self.rows <= 2**31 else torch.int64

    def check_count(self, count: int, whose: str) -> None:
        """Refuse more rows than there are, before memory is set aside for them."""
        if not 0 <= count <= self.rows:
            raise FrameError(f"{whose} sent {count} rows of a table of {self.rows}")

    def empty(self, count: int) -> "Rows":
        return Rows(torch.empty(count, dtype=torch.int64), torch.empty((count, *self.shape), dtype=self.dtype))


@dataclass(frozen=True)
class Rows:
    """Some rows of a table: their numbers, ascending, each once; and their values. What is not there is not zero.

    They are on the host, wherever the table is.
    """

    indices: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of_gradient(cls, gradient: torch.Tensor) -> "Rows":
        """Those of a sparse gradient. Rows that a lane has several times are added up here."""
        indices, order = torch.sort(gradient._indices()[0], stable=True)
        if not bool((indices[1:] == indices[:-1]).any()):
            # The same, in a fraction of the time.
            return cls(indices, gradient._values().index_select(0, order)).to(_HOST)
        coalesced = gradient.coalesce()
        return cls(coalesced.indices()[0], coalesced.values()).to(_HOST)

    @classmethod
    def of_table(cls, parameter: torch.Tensor, indices: torch.Tensor) -> "Rows":
        values = parameter.detach().index_select(0, indices.to(parameter.device))
        return cls(indices, values.to(_HOST))

    def put_into(self, parameter: torch.Tensor) -> None:
        there = self.to(parameter.device)
        with torch.no_grad():
            parameter.index_copy_(0, there.indices, there.values)

    def to(self, device: torch.device) -> "Rows":
        return Rows(self.indices.to(device), self.values.to(device))

    @property
    def count(self) -> int:
        return self.indices.numel()

    def check(self, table: Table, whose: str) -> None:
        """Refuse numbers that are not ascending or not in the table: a sum or a copy by them would be wrong."""
        if not self.count:
            return
        in_order = self.count == 1 or bool((self.indices[1:] > self.indices[:-1]).all())
        if not in_order or int(self.indices[0]) < 0 or int(self.indices[-1]) >= table.rows:
            raise FrameError(f"{whose} sent numbers of rows that are no ascending rows of a table of {table.rows}")

    def as_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """A sparse gradient over the same values, where the parameter is."""
        there = self.to(parameter.device)
        # Said of all tensors too: else some torch warns that it was not said.
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            return torch.sparse_coo_tensor(
                there.indices.unsqueeze(0), there.values, parameter.shape, is_coalesced=True, check_invariants=False
            )


def sum_rows(lanes: Sequence[Rows], table: Table) -> Rows:
    """The sum over lanes, in lane order, each addition rounded: whoever hosts them, the same bits.

    A row is summed over the lanes that have it. It is never added to zeros: 0.0 + -0.0 is 0.0, and the sign is part
    of the bits.
    """
    present = [rows for rows in lanes if rows.count]
    if len(present) <= 1:
        return present[0] if present else table.empty(0)
    indices = torch.unique(torch.cat([rows.indices for rows in present]))
    values = torch.empty((indices.numel(), *table.shape), dtype=table.dtype)
    seen = torch.zeros(indices.numel(), dtype=torch.bool)
    for rows in present:
        places = torch.searchsorted(indices, rows.indices)
        known = seen.index_select(0, places)
        added = rows.values
        if bool(known.any()):
            old = known.nonzero().view(-1)
            sums = values.index_select(0, places.index_select(0, old)).add_(added.index_select(0, old))
            added = added.index_copy(0, old, sums)
        values.index_copy_(0, places, added)
        seen.index_fill_(0, places, True)
    return Rows(indices, values)


ByBlock = Mapping[int, Rows]


class RowExchange:
    """Like an `Exchange`, for the blocks in `tables`, which have gradients by rows.

    `holders` has for each block the positions of the servers that hold it, the primary first. It may share its links
    with others if everybody uses them in the same order.
    """

    def __init__(self, spokes: Spokes, tables: Mapping[int, Table], holders: Sequence[Sequence[int]]) -> None:
        self._spokes = spokes
        self._tables = dict(sorted(tables.items()))
        self._held = {at: [block for block in self._tables if at in holders[block]] for at in spokes.servers}
        self._led = {at: [block for block in self._tables if holders[block][0] == at] for at in spokes.servers}
        self._received: dict[int, ByBlock] = {}

    def push(self, step: int, lanes: Mapping[int, ByBlock]) -> None:
        """A worker: send what its lanes have of each table to every server that holds it."""
        with self._spokes.exchange():
            for server in self._spokes.peers:
                for lane, rows in sorted(lanes.items()):
                    self._send(server, step, lane, self._held[server], rows)

    def receive(self, step: int) -> None:
        """A server: have the rows of all lanes."""
        spokes = self._spokes
        received: dict[int, ByBlock] = {}
        with spokes.exchange():
            for worker in spokes.peers:
                for lane in spokes.generation.members[worker].lanes:
                    received[lane] = self._receive(worker, step, lane, self._held[spokes.position])
        self._received = received

    def add_up(self) -> dict[int, Rows]:
        """A server: the sum over all lanes of the tables that it holds."""
        lanes = [self._received[lane] for lane in sorted(self._received)]
        return {
            block: sum_rows([rows[block] for rows in lanes], self._tables[block])
            for block in self._held[self._spokes.position]
        }

    def publish(self, step: int, rows: ByBlock) -> None:
        """A server: send the rows that have changed of tables of which it is the primary to all workers."""
        with self._spokes.exchange():
            for worker in self._spokes.peers:
                self._send(worker, step, _PUBLISHED, self._led[self._spokes.position], rows)

    def pull(self, step: int) -> dict[int, Rows]:
        """A worker: the rows that have changed, of all tables."""
        pulled: dict[int, Rows] = {}
        with self._spokes.exchange():
            for server in self._spokes.peers:
                pulled |= self._receive(server, step, _PUBLISHED, self._led[server])
        return pulled

    def _send(self, peer: int, step: int, lane: int, blocks: Sequence[int], rows: ByBlock) -> None:
        if not blocks:
            return
        counts = torch.tensor([rows[block].count if block in rows else 0 for block in blocks])
        self._spokes.send(peer, self._tag(step, COUNT_CHANNEL, lane, blocks[0]), counts)
        for block, count in zip(blocks, counts.tolist(), strict=True):
            if count:
                table, given = self._tables[block], rows[block]
                self._spokes.send(
                    peer, self._tag(step, INDEX_CHANNEL, lane, block), given.indices.to(table.index_dtype)
                )
                values = given.values.contiguous().view(-1)
                self._spokes.send(peer, self._tag(step, VALUE_CHANNEL, lane, block), values)

    def _receive(self, peer: int, step: int, lane: int, blocks: Sequence[int]) -> dict[int, Rows]:
        if not blocks:
            return {}
        spokes, whose = self._spokes, self._spokes.name(peer)
        counts = torch.empty(len(blocks), dtype=torch.int64)
        spokes.receive(peer, self._tag(step, COUNT_CHANNEL, lane, blocks[0]), counts)
        received: dict[int, Rows] = {}
        for block, count in zip(blocks, counts.tolist(), strict=True):
            table = self._tables[block]
            table.check_count(count, whose)
            rows = table.empty(count)
            if count:
                indices = torch.empty(count, dtype=table.index_dtype)
                spokes.receive(peer, self._tag(step, INDEX_CHANNEL, lane, block), indices)
                rows.indices.copy_(indices)
                spokes.receive(peer, self._tag(step, VALUE_CHANNEL, lane, block), rows.values.view(-1))
                rows.check(table, whose)
            received[block] = rows
        return received

    def _tag(self, step: int, channel: int, lane: int, block: int) -> Tag:
        return Tag(self._spokes.generation.id, step, channel, lane * 2**20 + block)


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

    def check_left_alone(self) -> None:
        super().check_left_alone()
        for index in self._left:
            if not self._is_left(index):
                raise detached(self.names[index])
