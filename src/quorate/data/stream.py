"""A training set that can only be read from its beginning on: one iterator for each lane."""

import contextlib
import io
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch

from quorate.core.digests import derive_seed
from quorate.core.errors import TaskError
from quorate.core.user_code import given
from quorate.data.bad_sample import Unreachable
from quorate.data.indices import Indices
from quorate.data.sampler import Sampler, refuse_short
from quorate.data.streams import seed_generators
from quorate.lanes.chunks import cut
from quorate.spec.job import JobSpec
from quorate.storage.atomic import write_atomically

log = logging.getLogger(__name__)

ENDLESS = 1 << 53
"""As many samples as no job reads: those of an epoch that never ends."""
BOOKMARKS = 64
"""So many for each shard and epoch; and without an end, one every so many batches."""
_END = object()


class Stream:
    """A training set that is read in order, such as a `torch.utils.data.IterableDataset`: a stream for each shard.

    ::

        def datasets(self):
            return quorate.Stream(self.read, samples=60_000), validation_set

        def read(self, epoch, shard, shards):
            for file in files[shard::shards]:
                yield from samples_in(file)

    `open(epoch, shard, shards)` gives the iterator of one shard. There are as many shards as the job has lanes, and a
    lane reads its own, whichever worker hosts it. `samples` is the length of an epoch: each shard gives its part of
    every batch, and the next epoch begins with new iterators. Without it there is one epoch, which ends with the
    job's `steps`. A stream may be longer than its part; one that is shorter ends the job. What is drawn from the global
    generators is the same whoever reads.

    The step says where each stream stands. Another worker, or a resumed run, reads up to there from the beginning; what
    has `state_dict()` and `load_state_dict()` is continued from a bookmark instead.
    """

    is_read_in_order = True

    def __init__(self, open: Callable[[int, int, int], Iterable[Any]], samples: int | None = None) -> None:
        if not callable(open):
            raise TaskError(
                f"quorate.Stream was given {given(open)}: it takes a function of (epoch, shard, shards) that gives an "
                "iterator over the samples of one shard."
            )
        if samples is not None and (not isinstance(samples, int) or samples < 1):
            raise TaskError(f"quorate.Stream(..., samples={samples!r}): that is how many make an epoch, at least 1.")
        self._open = open
        self._samples = samples
        self._readers: dict[int, _Reader] = {}
        # Where bookmarks are kept, if they are.
        self.bookmarks: Path | None = None

    def bind(self, spec: JobSpec) -> None:
        """Learn how the job cuts it: called once, before anything is read."""
        if self._samples is None and spec.steps is None:
            raise TaskError(
                "A quorate.Stream without `samples` has no epochs. Say how many samples make one, "
                "quorate.Stream(open, samples=...), or give the job `steps` in the place of `epochs`."
            )
        self._seed, self._lanes, self._batch = spec.seed, spec.lanes, spec.batch_size
        self._every = max(1, self._part(0) // BOOKMARKS if self._samples else BOOKMARKS * self._share(0))

    def __len__(self) -> int:
        """Samples of an epoch."""
        return ENDLESS if self._samples is None else self._samples

    def __getitem__(self, index: int) -> Any:
        return self.read(0, index)

    @property
    def in_words(self) -> str:
        """What it is, and how long."""
        return "a stream without an end" if self._samples is None else f"a stream of {self._samples:,} samples"

    def read(self, epoch: int, index: int) -> Any:
        """A sample of an epoch, by its number among those of all lanes in the order of their batches."""
        shard, position = self._place(index)
        reader = self._readers.get(shard)
        if reader is None or reader.epoch != epoch or position < reader.oldest:
            reader = self._readers[shard] = _Reader(self, epoch, shard, position)
        return reader.at(position)

    def _place(self, index: int) -> tuple[int, int]:
        """Its shard, and its position in that: all batches before its own are whole."""
        batch, rest = divmod(index, self._batch)
        parts = cut(min(self._batch, len(self) - batch * self._batch), self._lanes)
        shard = next(lane for lane, part in enumerate(parts) if rest < part.stop)
        return shard, batch * self._share(shard) + rest - parts[shard].start

    def _share(self, shard: int) -> int:
        return _length(cut(self._batch, self._lanes)[shard])

    def _part(self, shard: int) -> int:
        """How many a shard gives in an epoch."""
        whole, rest = divmod(len(self), self._batch)
        return whole * self._share(shard) + _length(cut(rest, self._lanes)[shard])


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class _Reader:
    """One iterator, somewhere in its epoch. The newest samples are kept: a step that is redone reads them again."""

    def __init__(self, stream: Stream, epoch: int, shard: int, position: int) -> None:
        self._stream = stream
        self.epoch = epoch
        self._shard = shard
        self._next = 0
        self._recent: deque[Any] = deque(maxlen=2 * stream._share(0))
        seed_generators(derive_seed(stream._seed, "stream", epoch, shard))
        self._source: Any = stream._open(epoch, shard, stream._lanes)
        can_bookmark = all(hasattr(self._source, name) for name in ("state_dict", "load_state_dict"))
        self._folder = stream.bookmarks / f"shard-{shard}" / str(epoch) if stream.bookmarks and can_bookmark else None
        if self._folder is not None:
            shutil.rmtree(self._folder.parent / str(epoch - 2), ignore_errors=True)
            self._restore(self._folder, position)
        self._iterator = iter(self._source)

    @property
    def oldest(self) -> int:
        """The first position that it can still give."""
        return self._next - len(self._recent)

    def at(self, position: int) -> Any:
        while self._next <= position:
            self._advance()
        return self._recent[position - self._next]

    def _advance(self) -> None:
        stream = self._stream
        if self._folder is not None and self._next and self._next % stream._every == 0:
            self._keep(self._folder)
        # Also before those that are only passed over: what comes later may depend on what they draw.
        seed_generators(derive_seed(stream._seed, "stream", self.epoch, self._shard, self._next))
        sample = next(self._iterator, _END)
        if sample is _END:
            wanted = "this step" if stream._samples is None else f"its part of samples={stream._samples:,}"
            needed = "more" if stream._samples is None else f"{stream._part(self._shard):,}"
            raise Unreachable(
                f"the stream of shard {self._shard} of {stream._lanes} ended after {self._next:,} samples in epoch "
                f"{self.epoch}, and {wanted} needs {needed}. Every shard gives as many: declare `samples` by the "
                "shortest (its length × lanes), divide the data more evenly, or let a short shard begin again"
            )
        self._recent.append(sample)
        self._next += 1

    def _keep(self, folder: Path) -> None:
        content = io.BytesIO()
        try:
            torch.save(self._source.state_dict(), content)
            for each in (folder.parents[1], folder.parent, folder):  # not the run, which may have been renamed
                each.mkdir(exist_ok=True)
            write_atomically(folder / f"{self._next}.pt", content.getvalue())
        except OSError as error:  # without it more is read again, that is all
            log.info("no bookmark of shard %d at %d: %s", self._shard, self._next, error)

    def _restore(self, folder: Path, position: int) -> None:
        """Begin at the newest bookmark before a position that can be read."""
        for file in sorted(folder.glob("*.pt"), key=lambda file: -int(file.stem)):
            if int(file.stem) <= position:
                with contextlib.suppress(Exception):  # cut off, or not of plain values and tensors
                    state = torch.load(file, weights_only=True)
                    self._source.load_state_dict(state)
                    self._next = int(file.stem)
                    return


class StreamSampler(Sampler):
    """Samples as they come: batch after batch, cut into the parts of the lanes."""

    def __init__(self, spec: JobSpec, samples: int) -> None:
        self.spec = spec
        self.samples = self.epoch_length = samples
        refuse_short(spec, self.epoch_length, "An epoch of the stream")

    def is_own(self, epoch: int) -> bool:  # noqa: ARG002
        return True

    def share(self, step: int, lane: int) -> Indices:
        begin = (step - 1) % self.steps_per_epoch * self.spec.batch_size
        part = cut(self.batch_samples(step), self.spec.lanes)[lane]
        return numpy.arange(begin + part.start, begin + part.stop, dtype=numpy.int64)

    def dropped(self, epoch: int) -> Indices:  # noqa: ARG002
        return numpy.arange(self.steps_per_epoch * self.spec.batch_size, self.epoch_length, dtype=numpy.int64)
