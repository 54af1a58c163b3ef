"""The task's datasets, addressed by request: each sample has a random stream of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from quorate.core.errors import TaskError
from quorate.core.seeds import derive_seed
from quorate.core.user_code import describe, user_traceback
from quorate.data.collate import fresh_copy
from quorate.data.reading import Request, Source
from quorate.data.streams import seed_generators


class Dataset(Protocol):
    """Anything with `len()` and `[]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Fetched:
    """A collated batch and the request that it answers."""

    request: Request
    batch: Any


@dataclass(frozen=True)
class FetchTrouble:
    """User code raised while fetching. A value, because exceptions lose their traceback between processes."""

    request: Request
    index: int | None
    message: str
    traceback: str


@dataclass(frozen=True)
class Samples:
    """What a loader reads from; it may live in another process than the worker."""

    datasets: dict[Source, Dataset]
    collate: Callable[[Sequence[Any]], Any]
    seed: int
    # A collate() of one's own may hand out the dataset's own memory, and a loss() that works in place would then
    # change the dataset, in one worker only. A loader process does not help: it shares the memory of what it sends.
    copies: bool = False

    def __getitem__(self, request: Request) -> Fetched | FetchTrouble:
        index: int | None = None
        try:
            dataset = self.datasets[request.source]
            fetched = []
            for index in request.indices:
                seed_generators(derive_seed(self.seed, "sample", request.source.value, request.epoch, index))
                fetched.append(dataset[index])
            index = None
            batch = self.collate(fetched)
            return Fetched(request, fresh_copy(batch) if self.copies else batch)
        except (Exception, SystemExit) as error:  # a loader must not vanish because a dataset calls `sys.exit()`
            return FetchTrouble(request, index, describe(error), user_traceback(error))


def check_dataset(dataset: Any, which: str) -> Dataset:
    """Refuse what cannot be read by index, with the remedy."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        lacks = "length" if not hasattr(dataset, "__len__") else "[]"
        raise TaskError(
            f"datasets() gave a {type(dataset).__name__} as the {which} set, which has no {lacks}. Samples are read by "
            "index, so that any number of workers reads each exactly once: give anything with len() and [], such as a "
            "list or a torch Dataset (an IterableDataset becomes one with list(...))."
        )
    if len(dataset) == 0:
        raise TaskError(f"The {which} set that datasets() gave is empty.")
    return dataset  # type: ignore[no-any-return]
