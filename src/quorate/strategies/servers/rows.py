"""Rows of a table that has very many, of which a step touches few: what travels of them, and their sum over lanes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quorate.core.errors import FrameError

_HOST = torch.device("cpu")


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
    def width(self) -> int:
        """Elements of a row."""
        return torch.Size(self.shape).numel()

    @property
    def index_dtype(self) -> torch.dtype:
        """In which the numbers of rows travel."""
        return torch.int32 if self.rows <= 2**31 else torch.int64

    def check_count(self, count: int, whose: str) -> None:
        """Refuse more rows than there are, before memory is set aside for them."""
        if not 0 <= count <= self.rows:
            raise FrameError(f"{whose} sent {count} rows of a table of {self.rows}")

    def none(self) -> "Rows":
        return self.empty(0)

    def empty(self, count: int) -> "Rows":
        """Room for so many."""
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
        """Some rows of a parameter, as they are now."""
        values = parameter.detach().index_select(0, indices.to(parameter.device))
        return cls(indices, values.to(_HOST))

    def put_into(self, parameter: torch.Tensor) -> None:
        """Make them those of a parameter."""
        there = self.to(parameter.device)
        with torch.no_grad():
            parameter.index_copy_(0, there.indices, there.values)

    def to(self, device: torch.device) -> "Rows":
        """The same on a device, or on the host."""
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
        return present[0] if present else table.none()
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
