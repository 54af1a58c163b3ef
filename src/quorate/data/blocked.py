"""Training sets whose samples lie together in blocks, and are best read block after block."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy

from quorate.core.errors import TaskError
from quorate.core.given import given
from quorate.data.indices import Indices


@runtime_checkable
class Blocked(Protocol):
    """Its samples are the records of block 0, then those of block 1, and so on."""

    @property
    def blocks(self) -> Sequence[int] | Indices:
        """How many records each block has."""

    @property
    def window(self) -> int:
        """How many samples a lane shuffles at a time."""


@runtime_checkable
class Indexed(Protocol):
    """Its blocks are listed in a file, by which others find out what a run reads."""

    @property
    def index_path(self) -> str:
        """Where the index is: an absolute path or a URL."""

    @property
    def index_digest(self) -> str:
        """The digest of all that the index lists."""


@runtime_checkable
class Described(Protocol):
    """It tells what waiting for its samples depends on."""

    @property
    def reading_facts(self) -> dict[str, Any]:
        """Such as whether they come from a store; a run tells it when it begins."""


def records_of(dataset: Blocked, length: int) -> Indices:
    """The records of each block of a dataset with so many samples, checked."""
    try:
        records = numpy.asarray(dataset.blocks)
    except (TypeError, ValueError):
        records = numpy.asarray("")
    is_plain = records.ndim == 1 and (records.dtype.kind in "iu" or not len(records))
    if not is_plain or (len(records) and records.min() < 0):
        raise TaskError(
            f"The training set has `blocks` and `window`, so it is read block after block; but `blocks` is "
            f"{given(dataset.blocks)}. It must list how many records each block has, or have another name."
        )
    if (found := int(records.sum())) != length:
        raise TaskError(
            f"The blocks of the training set hold {found:,} records, but its len() is {length:,}: `blocks` must list "
            "how many records each block has, or have another name."
        )
    window = dataset.window
    if type(window) is not int or window < 1:
        raise TaskError(
            f"The window of the training set is {given(window)}: it must be a whole number of samples, at least 1."
        )
    return records.astype(numpy.int64)
