"""The task's datasets, addressed by request: each sample has a random stream of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from quorate.core.errors import TaskError
from quorate.core.given import given, likely_slip
from quorate.core.seeds import derive_seed
from quorate.core.user_code import building_code, describe, user_traceback
from quorate.data.collate import UnlikeSamples, collate, fresh_copy
from quorate.data.columns import Columns, columns_of
from quorate.data.reading import Request, Source
from quorate.data.streams import have_drawn, rest_generators, seed_generators

_NEEDED = {"__len__": "len()", "__getitem__": "[]"}
_BY_INDEX = (
    " Samples are read by index, so that any number of workers reads each exactly once: give anything with len() and "
    "[], such as a list or a torch Dataset (an IterableDataset becomes one with list(...))."
)
_ALIKE = "Make all samples alike in the dataset, or write collate(self, samples), which may pad or convert them."


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
    hint: str = ""


@dataclass(frozen=True)
class Samples:
    """What a loader reads from; it may live in another process than the worker."""

    datasets: dict[Source, Dataset]
    collate: Callable[[Sequence[Any]], Any]
    seed: int
    # A collate() of one's own may hand out the dataset's own memory, and a loss() that works in place would then
    # change the dataset, in one worker only. A loader process does not help: it shares the memory of what it sends.
    copies: bool = False
    # Which sets have been seen to draw from a random generator.
    drawing: set[Source] = field(default_factory=set, compare=False)

    def __getitem__(self, request: Request) -> Fetched | FetchTrouble:
        """Read so that every sample has a random stream of its own.

        To begin a stream costs more than to read a small sample, and most datasets draw nothing. So a batch is read
        without, and read again only if anything was drawn; from then on every sample begins its stream.
        """
        columns = self._columns.get(request.source)
        if columns is not None:
            return Fetched(request, columns.batch(request.indices))
        if request.source not in self.drawing:
            rest_generators()
            answer = self._read(request, seeded=False)
            if not have_drawn():
                return answer
            self.drawing.add(request.source)
        return self._read(request, seeded=True)

    @cached_property
    def _columns(self) -> dict[Source, Columns]:
        """Of the sets for which neither reading nor collating runs code of the task."""
        if self.collate is not collate:
            return {}
        found = {source: columns_of(dataset) for source, dataset in self.datasets.items()}
        return {source: columns for source, columns in found.items() if columns is not None}

    def _read(self, request: Request, seeded: bool) -> Fetched | FetchTrouble:
        index: int | None = None
        try:
            dataset = self.datasets[request.source]
            fetched = []
            for index in request.indices:
                if seeded:
                    seed_generators(derive_seed(self.seed, "sample", request.source.value, request.epoch, index))
                fetched.append(dataset[index])
            index = None
            batch = self.collate(fetched)
            return Fetched(request, fresh_copy(batch) if self.copies else batch)
        except UnlikeSamples as error:  # all is said: no line of the task would explain it better
            return FetchTrouble(request, None, self._named(error, request), "", _ALIKE)
        except (Exception, SystemExit) as error:  # a loader must not vanish because a dataset calls `sys.exit()`
            return FetchTrouble(request, index, describe(error), user_traceback(error))

    def _named(self, error: UnlikeSamples, request: Request) -> str:
        if self.copies:  # a collate() of one's own may have passed others on than it was given
            return str(error)
        indices = [str(request.indices[position]) for position in error.positions]
        which = f"sample {indices[0]}" if len(indices) == 1 else f"samples {' and '.join(indices)}"
        return f"{which} of the {request.source.value} set {error.how}"


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
