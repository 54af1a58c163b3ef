"""What a run has told of the shards that it reads, and where it stands in them."""

from dataclasses import dataclass, field
from typing import Any

from quorate.core.errors import QuorateError, RunError
from quorate.data.block_sampler import BlockSampler
from quorate.data.sharding import Sharding, sharding_at
from quorate.data.shards.index import ShardIndex, load_index
from quorate.history.timeline import Timeline
from quorate.observe.event import Event
from quorate.spec.job import JobSpec
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Streaming:
    """How a run reads a training set in blocks: how many there are, how many samples a lane shuffles at a time, and
    the index that lists them, with its digest; both are empty for blocks that no file lists."""

    blocks: int
    window: int
    # The same index may have been moved.
    index: str = field(default="", compare=False)
    digest: str = ""

    @classmethod
    def told(cls, fields: dict[str, Any]) -> "Streaming | None":
        """From what a run tells when it begins; None where it reads in no blocks."""
        data = fields.get("data")
        if not isinstance(data, dict):
            return None
        blocks, window = data.get("blocks"), data.get("window")
        if type(blocks) is not int or type(window) is not int or window < 1:
            return None
        return cls(blocks, window, str(data.get("index", "")), str(data.get("digest", "")))

    def load_index(self) -> ShardIndex:
        """The index as it was when the run read by it."""
        if not self.index:
            raise RunError("the blocks of its training set are listed in no index file")
        try:
            index = load_index(self.index)
        except QuorateError as error:
            raise RunError(f"the index of its shards cannot be read: {error.message.rstrip('.')}") from None
        if index.digest != self.digest:
            raise RunError(
                f"the index of its shards, {self.index}, has changed since (digest {index.digest}, and {self.digest} "
                "when the run read by it)"
            )
        return index

    def sampler(self, spec: JobSpec, index: ShardIndex) -> BlockSampler:
        """The order in which a job reads what the index lists."""
        return BlockSampler(spec, index.records, self.window)


@dataclass(frozen=True)
class DataProgress:
    """Where a run stands in its shards, with their names."""

    streaming: Streaming
    names: tuple[str, ...]
    sharding: Sharding


def read_data_progress(run: RunFolder) -> DataProgress:
    """Where a run stands in its shards, by what its folder holds."""
    timeline = Timeline.glance(run.events_file)
    begun = timeline.of_kind("run")
    if not begun:
        raise RunError(f"run {run.name} has not begun to train yet, so there is nothing to tell of its data.")
    streaming = Streaming.told(begun[-1].fields)
    if streaming is None:
        raise RunError(f"run {run.name} {_why_no_shards(run)} --data is for training sets in shards (quorate.Shards).")
    try:
        index = streaming.load_index()
    except RunError as error:
        raise RunError(f"run {run.name} cannot be held against its data: {error.message}.") from None
    spec = load_recorded(run.job_file, {}, []).spec
    order = streaming.sampler(spec, index)
    hosts = _hosts(timeline.of_kind("generation"))
    sharding = sharding_at(order, index.shard_of_block, len(index.shards), timeline.position, hosts)
    return DataProgress(streaming, index.shards, sharding)


def _why_no_shards(run: RunFolder) -> str:
    steps = Timeline.read(run.events_file, {"own_order"}.__contains__).steps
    if any(fields.get("own_order") for fields in steps.values()):
        return (
            "reads its training set in the order that the task's order() gives, sample by sample and not block by "
            "block, so that no lane has shards of its own; without order() it would."
        )
    return (
        "does not read its training set in shards: each sample is read by its number, in an order that is shuffled as "
        "a whole."
    )


def _hosts(generations: tuple[Event, ...]) -> dict[int, int]:
    """The worker of each lane, as the last generation says."""
    told = generations[-1].fields.get("members") if generations else None
    members = [each for each in told if isinstance(each, dict)] if isinstance(told, list) else []
    hosting = [(each.get("worker"), each.get("lanes")) for each in members]
    return {lane: worker for worker, lanes in hosting if type(worker) is int for lane in lanes or ()}
