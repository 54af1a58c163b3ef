"""What a task may give as a dataset: anything that can be read by index."""

from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from quorate.core.errors import TaskError
from quorate.core.given import given, likely_slip
from quorate.core.user_code import building_code

_NEEDED = {"__len__": "len()", "__getitem__": "[]"}
_BY_INDEX = (
    " Samples are read by index, so that any number of workers reads each exactly once: give anything with len() and "
    "[], such as a list or a torch Dataset. An IterableDataset becomes one with list(...); data that do not fit into "
    "memory are read as quorate.Shards(PATH), from tar, Parquet, JSONL, text or HDF5 files that "
    "`quorate data index PATH` has listed."
)


class Dataset(Protocol):
    """Anything with `len()` and `[]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_dataset(dataset: Any, which: str) -> Dataset:
    """Refuse what cannot be read by index, with the remedy."""
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"datasets() gave a DataLoader as the {which} set; give the dataset that is inside it. "
            "Quorate makes the batches itself (batch_size, loader_workers in the job file; collate() in the task)."
        )
    lacks = next((lack for name, lack in _NEEDED.items() if not hasattr(dataset, name)), None)
    if isinstance(dataset, IterableDataset):
        lacks = "[]"
    if lacks is not None or isinstance(dataset, type):
        raise TaskError(
            f"datasets() gave {given(dataset)} as the {which} set, which has no {lacks or 'samples'}."
            f"{likely_slip(dataset) or _BY_INDEX}"
        )
    with building_code(f"len() of the {which} set"):
        length = len(dataset)
    if length == 0:
        raise TaskError(f"The {which} set that datasets() gave is empty: its len() is 0.")
    return dataset  # type: ignore[no-any-return]
