"""What a task may give as a dataset: anything that can be read by index. Tensors in memory are read by column."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from quorate.core.errors import TaskError
from quorate.core.user_code import building_code, given, likely_slip
from quorate.data.indices import Blocked, Indices

_ARRAYS = (torch.Tensor, numpy.ndarray)
_NEEDED = {"__len__": "len()", "__getitem__": "[]"}
_BY_INDEX = (
    " Samples are read by index, so that any number of workers reads each exactly once: give anything with len() and "
    "[], such as a list or a torch Dataset. What can only be read in order is given as a stream for each shard, "
    "quorate.Stream(open, samples=N), where open(epoch, shard, shards) gives an iterator, such as "
    "`lambda epoch, shard, shards: itertools.islice(dataset, shard, None, shards)`. Data that do not fit into memory "
    "are also read as quorate.Shards(PATH), from tar, Parquet, JSONL, text or HDF5 files that "
    "`quorate data index PATH` has listed."
)


class Dataset(Protocol):
    """Anything with `len()` and `[]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


LIMIT = 160_000_000
"""Bytes of blocks that a process keeps, unless what it reads at the same time is more."""


class BlockSet(Dataset, Blocked, Protocol):
    """A dataset that Quorate itself reads, block after block, as `quorate.Shards` does. Whole blocks are read ahead.

    `limit` is how many bytes of blocks a process may keep, and `fingerprint` a digest of every byte. Samples that
    `decode` has made may be cached under `cache_key`. What its methods do is said there.
    """

    limit: int
    fingerprint: str
    has_decode: bool
    cache_key: str | None

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def is_columns(self) -> bool: ...

    @property
    def in_words(self) -> str: ...

    def batch(self, indices: Sequence[int] | Indices) -> Any: ...

    def blocks_of(self, indices: Sequence[int] | Indices) -> list[int]: ...

    def block_bytes(self, block: int) -> int: ...

    def prefetch(self, blocks: Sequence[int]) -> None: ...

    def keeping(self) -> AbstractContextManager[Any]: ...

    def settle(self, drew: bool) -> None: ...

    def uncached(self) -> AbstractContextManager[Any]: ...

    def name_of(self, index: int) -> str: ...

    @property
    def unreadable_hint(self) -> str: ...

    @property
    def alike_hint(self) -> str: ...


class InOrder(Dataset, Protocol):
    """What is read in order, as a `quorate.Stream` is."""

    bookmarks: Any

    def bind(self, spec: Any) -> None: ...

    def read(self, epoch: int, index: int) -> Any: ...

    @property
    def in_words(self) -> str: ...


# By a mark of their classes: whoever has neither imports neither.


def is_block_set(dataset: Any) -> TypeGuard[BlockSet]:
    """Whether it is read by blocks."""
    return getattr(type(dataset), "is_read_by_blocks", False) is True


def is_stream(dataset: Any) -> TypeGuard[InOrder]:
    """Whether it is read in order."""
    return getattr(type(dataset), "is_read_in_order", False) is True


def check_dataset(dataset: Any, which: str, giver: str = "datasets()") -> Dataset:
    """Refuse what cannot be read by index, with the remedy. `giver` is what gave it."""
    gave = f"{giver} was given" if giver.startswith("run.") else f"{giver} returned"
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"{gave} a DataLoader as the {which} set; give the dataset that is inside it. "
            "Quorate makes the batches itself (batch_size, loader_workers in the job file; collate() in the task)."
        )
    if is_stream(dataset):
        raise TaskError(
            f"{gave} a quorate.Stream as the {which} set. A stream is the training set of a task's "
            "datasets(); here give anything with len() and [], such as a list of the first samples."
        )
    lacks = next((lack for name, lack in _NEEDED.items() if not hasattr(dataset, name)), None)
    if isinstance(dataset, IterableDataset):
        lacks = "[]"
    if lacks is not None or isinstance(dataset, type):
        has_index = lacks == "len()" and hasattr(type(dataset), "__getitem__")
        no_length = has_index and f" Write `def __len__(self):` in {type(dataset).__name__}: the number of its samples."
        raise TaskError(
            f"{gave} {given(dataset)} as the {which} set, which has no {lacks or 'samples'}."
            f"{likely_slip(dataset) or no_length or _BY_INDEX}"
        )
    with building_code(f"len() of the {which} set"):
        length = len(dataset)
    if length == 0:
        raise TaskError(f"The {which} set that {giver} returned is empty: its len() is 0.")
    return dataset  # type: ignore[no-any-return]


def refuse_unpaired(given: Any) -> None:
    """Refuse what datasets() has returned where that would pass for datasets and is none: sets by name, which are read
    by index here, and inputs beside their targets."""
    if isinstance(given, Mapping) and given and all(isinstance(key, str) for key in given):
        names = ", ".join(map(repr, given))
        raise TaskError(
            f"datasets() returned a {type(given).__name__} with {names}. Return the datasets in it: (training set, "
            "validation set)."
        )
    sets = given if isinstance(given, tuple) else (given,)
    for pair in (sets, *sets):
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(each, _ARRAYS) for each in pair):
            continue
        is_alike = (pair[0].dtype, pair[0].shape[1:]) == (pair[1].dtype, pair[1].shape[1:])
        if pair is not sets or (not is_alike and pair[0].shape[:1] == pair[1].shape[:1]):
            raise TaskError(
                "datasets() returned inputs and targets, and not datasets, of which each sample has both. Write "
                "torch.utils.data.TensorDataset(torch.as_tensor(inputs), torch.as_tensor(targets))."
            )


Room = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Gives an empty tensor of the host, for a batch. Called in threads."""


@dataclass(frozen=True)
class Columns:
    """Tensors whose rows are samples; `rows` says which row is which sample, where that is not the same."""

    tensors: tuple[torch.Tensor, ...]
    rows: torch.Tensor | None = None

    def batch(self, indices: Indices, room: Room | None = None) -> list[torch.Tensor]:
        """What stacking these samples one by one would give; in `room` where there is any."""
        wanted = torch.from_numpy(indices)
        if self.rows is not None:
            wanted = self.rows[wanted]
        if room is None:
            return [tensor.index_select(0, wanted) for tensor in self.tensors]
        places = [room((len(wanted), *tensor.shape[1:]), tensor.dtype) for tensor in self.tensors]
        return [torch.index_select(t, 0, wanted, out=place) for t, place in zip(self.tensors, places, strict=True)]


def columns_of(dataset: Any) -> Columns | None:
    """The columns that a dataset consists of; None if it is anything else, or may do more than to give a row."""
    if type(dataset) is TensorDataset:
        return Columns(dataset.tensors) if dataset.tensors and all(map(_is_plain, dataset.tensors)) else None
    if type(dataset) is not Subset or (whole := columns_of(dataset.dataset)) is None:
        return None
    rows = _rows(dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]
    return None if rows is None else Columns(whole.tensors, rows if whole.rows is None else whole.rows[rows])


def _rows(indices: Sequence[int], length: int) -> torch.Tensor | None:
    """Indices from 0 as a tensor; None if any is something else, of which a dataset may make what it likes."""
    try:
        rows = numpy.asarray(indices)
    except (TypeError, ValueError, RuntimeError):
        return None
    # A fraction, or a mask of booleans, would turn into numbers without a word.
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size or rows.min() < 0 or rows.max() >= length:
        return None
    return torch.from_numpy(rows.astype(numpy.int64))


def _is_plain(tensor: torch.Tensor) -> bool:
    # Others may be stacked into another layout, carry a graph, or be more than a tensor.
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if type(tensor) is not torch.Tensor or not is_dense or not tensor.is_contiguous() or tensor.requires_grad:
        return False
    try:  # some types can be stacked and not selected from, such as one-dimensional ones of uint16
        tensor.index_select(0, torch.zeros(1, dtype=torch.int64))
    except (RuntimeError, IndexError):
        return False
    return True
