"""What a run has told of the shards that it reads, where it stands in them, and where bad samples lie."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy

from quorate.core.addresses import is_url, shown
from quorate.core.errors import QuorateError, RunError
from quorate.data.block_sampler import BlockSampler, LaneReading, Sharding, sharding_at
from quorate.data.indices import Ranges
from quorate.history.event_index import glance
from quorate.history.timeline import Timeline
from quorate.observe.events import GenerationFormed, RunBegan, TrainingBlocks
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder


def blocks_of(begun: RunBegan) -> TrainingBlocks | None:
    """How a run reads its training set in blocks, as it tells when it begins; None where it reads in none."""
    return None if begun.data is None or begun.data.window < 1 else begun.data


def index_of(data: TrainingBlocks) -> Any:
    """The index of its shards as it was when the run read by it: a `ShardIndex`."""
    if not data.index:
        raise RunError("the blocks of its training set are listed in no index file")
    try:
        index = resolve_name("quorate.shards.index:load_index")(data.index)
    except QuorateError as error:
        raise RunError(f"the index of its shards cannot be read: {error.message.rstrip('.')}") from None
    if index.digest != (data.digest or ""):
        raise RunError(
            f"the index of its shards, {data.index}, has changed since (digest {index.digest}, and {data.digest or ''} "
            "when the run read by it)"
        )
    return index


@dataclass(frozen=True)
class BadPlace:
    """Samples from `first` to `last`, which are so many records of a file from `record` on."""

    first: int
    last: int
    file: str
    record: int

    @property
    def in_words(self) -> str:
        if self.first == self.last:
            return f"sample {self.first}: record {self.record} of {self.file}"
        end = self.record + self.last - self.first
        return f"samples {self.first}-{self.last}: records {self.record}-{end} of {self.file}"


def bad_places(index: Any, ranges: Ranges) -> Iterator[BadPlace]:
    """Where these samples lie, one file after the other; what the index does not list is passed over."""
    begins = index.first[index.first_block]
    for first, last in ranges:
        while first <= min(last, len(index) - 1):
            shard = int(numpy.searchsorted(begins, first, side="right")) - 1
            end = min(last, int(begins[shard + 1]) - 1)
            yield BadPlace(first, end, index.shards[shard], first - int(begins[shard]))
            first = end + 1


@dataclass(frozen=True)
class DataProgress:
    """Where a run stands in its shards, with their names."""

    data: TrainingBlocks
    names: tuple[str, ...]
    sharding: Sharding

    def shard_of(self, lane: LaneReading) -> str | None:
        return None if lane.shard is None else self.names[lane.shard]

    def document(self) -> dict[str, Any]:
        """All of it, as `quorate show --data --json` prints it (schema in docs/json)."""
        return {
            "index": shown_place(self.data.index or ""),
            "index_digest": self.data.digest,
            "window": self.data.window,
            "step": self.sharding.step,
            "epoch": self.sharding.epoch,
            "samples_done": self.sharding.samples_done,
            "samples_left": self.sharding.samples_left,
            "shards": asdict(self.sharding.shards),
            "blocks": asdict(self.sharding.blocks),
            "lanes": [asdict(lane) | {"shard": self.shard_of(lane)} for lane in self.sharding.lanes],
        }


def shown_place(place: str) -> str:
    """A folder, a file or a URL, by the shortest path; a link on the way may make that another one, then as it is."""
    if is_url(place):
        return shown(place)
    plain = os.path.normpath(place)
    return plain if Path(plain).resolve() == Path(place).resolve() else place


def read_data_progress(run: RunFolder) -> DataProgress:
    """Where a run stands in its shards, by what its folder holds."""
    timeline = glance(run.events_file)
    begun = timeline.of_kind(RunBegan)
    if not begun:
        raise RunError(f"run {run.name} has not started to train yet, so there is nothing to show of its data.")
    data = blocks_of(begun[-1])
    if data is None:
        why = (
            "does not read its training set in shards: each sample is read by its number, in an order that is shuffled "
            "as a whole."
        )
        if any(step.own_order for step in Timeline.read(run.events_file, ("own_order",)).steps.values()):
            why = (
                "reads its training set in the order that the task's order() gives, sample by sample and not block by "
                "block, so that no lane has shards of its own; without order() it would."
            )
        raise RunError(f"run {run.name} {why} --data is for training sets in shards (quorate.Shards).")
    try:
        index = index_of(data)
    except RunError as error:
        raise RunError(f"run {run.name} cannot be held against its data: {error.message}.") from None
    spec = load_recorded(run.job_file, {}, []).spec
    order = BlockSampler(spec, index.records, data.window)
    formed = timeline.of_kind(GenerationFormed)[-1:]
    hosts = {lane: each.worker for event in formed for each in event.members or () for lane in each.lanes}
    sharding = sharding_at(order, index.shard_of_block, len(index.shards), timeline.position, hosts)
    return DataProgress(data, index.shards, sharding)
