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
    if not _is_torchs(first.dtype) or any(column.dtype != first.dtype for _, column in parts):
        values: list[Any] = [None] * length
        for positions, column in parts:
            for position, value in zip(positions.tolist(), rows(column), strict=True):
                values[position] = value
        return collate(values)
    if len(parts) == 1:
        return torch.from_numpy(numpy.ascontiguousarray(first))
    whole = numpy.empty((length, *first.shape[1:]), first.dtype)
    for positions, column in parts:
        whole[positions] = column
    return torch.from_numpy(whole)


def rows(column: Array) -> Any:
    """The values of a column one by one, as they can be collated: texts and records are values of Python."""
    return column.tolist() if column.dtype.kind in "SUV" else column


@cache
def _is_torchs(kind: "numpy.dtype[Any]") -> bool:
    """Whether torch has tensors of this type."""
    try:
        torch.from_numpy(numpy.empty(0, kind))
    except (TypeError, ValueError):
        return False
    return True
