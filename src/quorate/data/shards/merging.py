"""Columns of several blocks as one batch: a tensor where torch has the type, and otherwise what collating gives."""

from functools import cache
from typing import Any

import numpy
import torch

from quorate.data.collate import collate
from quorate.data.indices import Indices

Array = numpy.ndarray[Any, Any]


def merged(parts: list[tuple[Indices, Array]], length: int) -> Any:
    """The rows of several blocks, each at its positions, as one tensor, or as a list of what has no shape."""
    first = parts[0][1]
    kind = _torchs(first.dtype)
    if kind is None or any(column.dtype != first.dtype for _, column in parts):
        values: list[Any] = [None] * length
        for positions, column in parts:
            for position, value in zip(positions.tolist(), rows(column), strict=True):
                values[position] = value
        return collate(values)
    # In memory of torch's own, which always begins at a round address: what is summed may depend on where it begins.
    whole = torch.empty((length, *first.shape[1:]), dtype=kind)
    array = whole.numpy()
    for positions, column in parts:
        array[positions if len(parts) > 1 else ...] = column
    return whole


def rows(column: Array) -> Any:
    """The values of a column one by one, as they can be collated: texts and records are values of Python."""
    return column.tolist() if column.dtype.kind in "SUV" else column


@cache
def _torchs(kind: "numpy.dtype[Any]") -> torch.dtype | None:
    """The type of torch that is the same; None if it has none."""
    try:
        return torch.from_numpy(numpy.empty(0, kind)).dtype
    except (TypeError, ValueError):
        return None
