"""The task's datasets, addressed by request: each sample has a random stream of its own."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy

from quorate.core.cached import cached_property
from quorate.core.digests import derive_seed
from quorate.core.errors import JobError, UserCodeError
from quorate.core.user_code import RAISED, describe, first_aid, is_ctrl_c, quit_in, user_traceback, with_hint
from quorate.data.bad_sample import COLLATE, BadSample, LeftOut, Unreachable
from quorate.data.collate import UnlikeSamples, collate, fresh_copy
from quorate.data.datasets import LIMIT, BlockSet, Columns, Dataset, columns_of, is_block_set, is_stream
from quorate.data.indices import Indices, indices_of
from quorate.data.sampler import Request, Source
from quorate.data.streams import have_drawn, rest_generators, seed_generators

_ALIKE = f"Make all samples alike in the dataset, {COLLATE}"


@dataclass(frozen=True)
class Batch:
    """A collated batch and the request that it answers; without content if all of its samples are bad.

    `why` says what is wrong with the first of the `bad` ones, which are left out. `notes` are what was met with in
    reading, and was not told before once a feed gives the batch; `draws`: random numbers are drawn for samples of this
    set.
    """

    request: Request
    content: Any
    bad: tuple[int, ...] = ()
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    draws: bool = field(default=False, compare=False)

    @property
    def samples(self) -> Indices:
        """Those that are in it, without the bad ones."""
        numbers = self.request.numbers
        return numbers[~numpy.isin(numbers, self.bad)] if self.bad else numbers

    @property
    def is_empty(self) -> bool:
        return not len(self.samples)


@dataclass(frozen=True)
class FetchFailure:
    """What kept a batch from being fetched. A value, because exceptions lose their traceback between processes.

    `kind`: user code raised it, a sample is bad, or the data cannot be reached.
    """

    request: Request
    index: int | None
    message: str
    traceback: str
    hint: str = ""
    kind: Literal["code", "sample", "access"] = "code"


def batch_of(answer: Batch | FetchFailure) -> Batch:
    """The batch; what was in the way of it is raised here."""
    if isinstance(answer, Batch):
        return answer
    source = answer.request.source.value
    where = "collate()" if answer.index is None else f"sample {answer.index} of the {source} set"
    if answer.kind == "access" or (answer.kind == "sample" and not answer.traceback):
        where = f"the {source} set" if answer.index is None else where
        raise JobError(with_hint(f"{where} cannot be read: {answer.message}", answer.hint))
    raise UserCodeError(with_hint(f"{answer.message} (in {where})", answer.hint), answer.traceback)


UpcomingBlocks = Mapping[Source, Sequence[int]]
"""The blocks of each set in shards that are read next, in order."""


@dataclass(frozen=True)
class Samples:
    """What a loader reads from; it may live in another process than the worker."""

    datasets: dict[Source, Dataset]
    collate: Callable[[Sequence[Any]], Any]
    seed: int
    # A collate() of one's own may hand out the dataset's own memory, and a loss() that works in place would then
    # change the dataset, in one worker only.
    copies: bool = False
    # Whether a bad sample is left out of its batch (on_bad_sample: skip); otherwise it ends the job.
    skips: bool = False
    # Which sets have been seen to draw from a random generator.
    drawing: set[Source] = field(default_factory=set, compare=False)
    # What was noted of reading, and told.
    noted: set[str] = field(default_factory=set, compare=False)

    def __getitem__(self, request: Request) -> Batch | FetchFailure:
        """The batch, or what is in the way of it."""
        answer = self._answer(request)
        if not self.shards or isinstance(answer, FetchFailure):
            return answer
        # Few, and with every batch: only who takes them all knows which are new.
        notes = tuple(note for shards in self.shards.values() for note in shards.notes if note not in self.noted)
        draws = request.source in self.drawing and request.source in self.shards
        return replace(answer, notes=notes, draws=draws) if notes or draws else answer

    def _answer(self, request: Request) -> Batch | FetchFailure:
        """Read so that every sample has a random stream of its own.

        To begin a stream costs more than to read a small sample, and most datasets draw nothing. So a batch is read
        without, and read again only if anything was drawn; from then on every sample begins its stream.
        """
        if request.source in self.columns:
            return self._read_columns(request, self.columns[request.source])
        shards = self.shards.get(request.source)
        if request.source not in self.drawing:
            # What depends on a draw is another sample in the next epoch, so only the rest may be cached.
            with nullcontext() if shards is None else shards.keeping():
                rest_generators()
                answer = self._read(request, seeded=False)
                if not have_drawn():
                    if shards is not None:
                        shards.settle(drew=False)
                    return answer
            self.drawing.add(request.source)
        if shards is not None:
            shards.settle(drew=True)
        return self._read(request, seeded=True)

    @cached_property
    def shards(self) -> dict[Source, BlockSet]:
        """The sets that are read block by block."""
        return {source: dataset for source, dataset in self.datasets.items() if is_block_set(dataset)}

    @cached_property
    def is_stream(self) -> bool:
        """Whether the training set is read in order, each lane from its own iterator."""
        return is_stream(self.datasets.get(Source.TRAINING))

    @cached_property
    def columns(self) -> dict[Source, Columns | BlockSet]:
        """The sets for which neither reading nor collating runs code of the task."""
        if self.collate is not collate:
            return {}
        found = {
            source: dataset if is_block_set(dataset) and dataset.is_columns else columns_of(dataset)
            for source, dataset in self.datasets.items()
        }
        return {source: columns for source, columns in found.items() if columns is not None}

    def divide_memory(self, processes: int) -> None:
        """So many processes read from now on: blocks may take no more memory in all of them than in one."""
        # An evaluation reads in order, and so needs few blocks at a time.
        parts = {source: 1 if source is Source.VALIDATION else 3 for source in self.shards}
        for sources in self._sources_by_set:
            own = sum(parts[source] for source in sources)
            self.shards[sources[0]].limit = LIMIT * own // (sum(parts.values()) * processes)

    def prefetch(self, blocks: UpcomingBlocks) -> None:
        for sources in self._sources_by_set:
            wanted = dict.fromkeys(block for source in sources for block in blocks.get(source, ()))
            self.shards[sources[0]].prefetch(list(wanted))

    @cached_property
    def _sources_by_set(self) -> list[list[Source]]:
        """One set may be both: what is expected of it, and the memory that it may take, is then for both together."""
        found: dict[int, list[Source]] = {}
        for source, dataset in self.shards.items():
            found.setdefault(id(dataset), []).append(source)
        return list(found.values())

    def _read_columns(self, request: Request, columns: Columns | BlockSet) -> Batch | FetchFailure:
        left_out = LeftOut()
        try:
            with suppress(BadSample):
                return Batch(request, columns.batch(request.numbers))
            # One by one, to find out which of them it is.
            for index in request.indices:
                try:
                    columns.batch(indices_of((index,)))
                except BadSample as error:
                    if not self.skips:
                        return FetchFailure(request, index, error.message, error.traceback, error.hint, "sample")
                    left_out.add(index, error)
            good = left_out.others(request.indices)
            batch = columns.batch(indices_of(good)) if good else None
            return Batch(request, batch, left_out.indices, left_out.why)
        except UnlikeSamples as error:
            return self._unlike(request, error, left_out)
        except Unreachable as error:
            return FetchFailure(request, None, error.message, "", kind="access")
        except MemoryError:  # of the machine, not of the data
            raise
        except Exception as error:
            hint = "" if isinstance(columns, Columns) else columns.unreadable_hint
            return FetchFailure(request, None, describe(error), "", hint, "access")

    def _read(self, request: Request, seeded: bool) -> Batch | FetchFailure:
        index: int | None = None
        left_out = LeftOut()
        try:
            dataset = self.datasets[request.source]
            fetched = []
            for index in request.indices:
                if seeded:
                    seed_generators(derive_seed(self.seed, "sample", request.source.value, request.epoch, index))
                try:
                    sample = dataset.read(request.epoch, index) if is_stream(dataset) else dataset[index]
                    fetched.append(sample)
                except BadSample as error:
                    if not self.skips:
                        return FetchFailure(request, index, error.message, error.traceback, error.hint, "sample")
                    left_out.add(index, error)
            index = None
            batch = self.collate(fetched) if fetched else None
            return Batch(request, fresh_copy(batch) if self.copies else batch, left_out.indices, left_out.why)
        except UnlikeSamples as error:
            return self._unlike(request, error, left_out)
        except Unreachable as error:
            return FetchFailure(request, index, error.message, "", kind="access")
        except RAISED as error:
            if is_ctrl_c(error):
                raise
            if (left := quit_in(error, f"the {request.source.value} set")) is not None:
                raise left from None
            return FetchFailure(request, index, describe(error), user_traceback(error), first_aid(error))

    # --- what is wrong

    def _unlike(self, request: Request, error: UnlikeSamples, left_out: LeftOut) -> FetchFailure:
        """All is said: no line of the task would explain it better."""
        shards, message, hint = self.shards.get(request.source), str(error), _ALIKE
        if shards is not None:
            hint = shards.alike_hint
        if not self.copies:  # a collate() of one's own may have passed others on than it was given
            collated, names = left_out.others(request.indices), str if shards is None else shards.name_of
            which = " and ".join(names(collated[position]) for position in error.positions)
            plural = "s" if len(error.positions) > 1 else ""
            message = f"sample{plural} {which} of the {request.source.value} set {error.how}"
        return FetchFailure(request, None, message, "", hint)
