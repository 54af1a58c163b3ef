"""A feed of shards: the same batches from any number of loaders, read ahead block by block, also of a slow store."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from data.shards.shard_files import same, small_blocks, write_indexed, write_shards
from quorate.core.errors import GenerationOver, JobError, UserCodeError
from quorate.data.bad_sample import Unreachable
from quorate.data.block_sampler import BlockSampler
from quorate.data.collate import collate
from quorate.data.feed import Feed
from quorate.data.loader import Loaders
from quorate.data.prefetch import MOST_REQUESTS, BlockPrefetch
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, Samples
from quorate.data.threads import CHECK_EVERY, check_interrupted
from quorate.shards.blocks import ShardBlocks
from quorate.shards.dataset import Shards
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index
from quorate.spec.job import JobSpec

__all__ = ["small_blocks"]

pytestmark = pytest.mark.usefixtures("small_blocks")
LANES = 3


def plan(samples: int, steps: int = 4) -> list[Request]:
    """Each lane reads its own third, two samples a step, and in the end there is an evaluation."""
    part = samples // LANES
    requests = [
        Request(Source.TRAINING, 0, (lane * part + 2 * step, lane * part + 2 * step + 1), lane)
        for step in range(steps)
        for lane in range(LANES)
    ]
    return [*requests, *(Request(Source.VALIDATION, 0, (batch,), batch % LANES) for batch in range(4))]


def who(record: str) -> tuple[str, int, Any]:
    return record[:6], os.getpid(), torch.rand(2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_indexed("text", tmp_path).folder


@contextlib.contextmanager
def feeding(
    folder: Path,
    loaders: int,
    requests: list[Request],
    decode: Any = who,
    lanes: int = LANES,
    check: Any = lambda: None,
    **options: Any,
) -> Iterator[Feed]:
    sets: dict[Source, Any] = {Source.TRAINING: Shards(folder, decode=decode), Source.VALIDATION: Shards(folder)}
    feed = Feed(Samples(sets, collate, 5, **options), iter(requests), loaders, 1, lanes=lanes, check=check)
    try:
        yield feed
    finally:
        feed.close()
        for each in sets.values():
            each.close()


def read(folder: Path, loaders: int, **options: Any) -> list[Batch]:
    requests = plan(48)
    with feeding(folder, loaders, requests, **options) as feed:
        return [feed.next(request) for request in requests]


@pytest.mark.parametrize("loaders", [1, 2, 8])
def test_batches_are_the_same_from_any_number_of_loaders(loaders: int, folder: Path) -> None:
    alone, loaded = read(folder, 0), read(folder, loaders)
    assert [tuple(batch.samples.tolist()) for batch in loaded] == [request.indices for request in plan(48)]
    for one, other in zip(alone[:12], loaded[:12], strict=True):
        assert one.content[0] == other.content[0]
        assert torch.equal(one.content[2], other.content[2])
    assert [batch.content for batch in alone[12:]] == [batch.content for batch in loaded[12:]]


def pids_by_lane(folder: Path, loaders: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for request, batch in zip(plan(48)[:12], read(folder, loaders), strict=False):
        found.setdefault(request.lane, set()).update(batch.content[1].tolist())
    assert os.getpid() not in set.union(*found.values())
    return found


@pytest.mark.parametrize("loaders", [2, LANES])
def test_a_lane_is_read_by_one_loader_where_there_are_lanes_enough(loaders: int, folder: Path) -> None:
    by_lane = pids_by_lane(folder, loaders)
    assert all(len(pids) == 1 for pids in by_lane.values())
    assert len(set.union(*by_lane.values())) == loaders


def test_several_loaders_take_turns_at_a_lane_where_there_are_more_of_them(folder: Path) -> None:
    by_lane = pids_by_lane(folder, 2 * LANES)
    assert {len(pids) for pids in by_lane.values()} == {2}
    assert len(set.union(*by_lane.values())) == 2 * LANES


def test_columns_need_no_loaders_and_give_the_same_with_any_number(tmp_path: Path) -> None:
    write_indexed("parquet", tmp_path)
    requests = plan(48)
    found = []
    for loaders in (0, 2):
        with feeding(tmp_path, loaders, requests, decode=None) as feed:
            assert not isinstance(feed._reader, Loaders)
            found.append([feed.next(request).content for request in requests])
    for one, other in zip(*found, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("loaders", [0, 2])
def test_bad_samples_are_told_beside_their_batch(loaders: int, folder: Path) -> None:
    def refuse(record: str) -> str:
        if record.startswith(("0 ", "2 ", "3 ")):
            raise ValueError("torn")
        return record[:4]

    batches = read(folder, loaders, decode=refuse, skips=True)
    assert [(tuple(batch.samples.tolist()), batch.bad) for batch in batches[:4]] == [
        ((1,), (0,)), ((16, 17), ()), ((32, 33), ()), ((), (2, 3)),
    ]  # fmt: skip
    assert batches[3].content is None
    requests = plan(48)
    with feeding(folder, loaders, requests, decode=refuse) as feed, pytest.raises(UserCodeError) as raised:
        feed.next(requests[0])
    assert "torn (in decode() of record 0 of shard-000.txt) (in sample 0 of the training set)" in raised.value.message


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_damaged_file_ends_the_job_with_its_name_and_digests(loaders: int, folder: Path) -> None:
    with (folder / "shard-000.txt").open("r+b") as file:
        file.write(b"\0")
    requests = plan(48)
    with feeding(folder, loaders, requests) as feed, pytest.raises(JobError) as raised:
        feed.next(requests[0])
    assert raised.value.message.startswith("sample 0 of the training set cannot be read: shard-000.txt, bytes 0 to ")
    assert not isinstance(raised.value, UserCodeError)


def test_blocks_are_read_ahead_in_the_worker_and_no_more_after_the_feed_is_closed(folder: Path) -> None:
    requests = plan(48)
    with feeding(folder, 0, requests, decode=len) as feed:
        feed.next(requests[0])
        shards = feed._samples.datasets[Source.TRAINING]
        assert isinstance(shards, Shards)
        assert shards._reader.here().threads
        feed.close()
        assert not shards._reader.here()._wanted


# --- looking ahead, without anything being read


class FewBlocks:
    """Ten samples a block, 100 bytes each block."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.index = self

    def blocks_of(self, indices: tuple[int, ...]) -> list[int]:
        return sorted({index // 10 for index in indices})

    def block_bytes(self, block: int) -> int:
        return 100


def looking(requests: Iterator[Request], limit: int = 1000) -> Iterator[tuple[Request, Any]]:
    shards: Any = {Source.TRAINING: FewBlocks(limit)}
    return iter(BlockPrefetch(requests, shards))


def lane_requests(count: int, lane: int = 0, start: int = 0) -> list[Request]:
    return [Request(Source.TRAINING, 0, (start + 5 * number,), lane) for number in range(count)]


def test_looking_ahead_gives_every_request_once_in_order() -> None:
    requests = lane_requests(700)
    assert [request for request, _ in looking(iter(requests))] == requests


def test_the_blocks_are_those_of_the_request_and_of_what_follows_as_far_as_the_memory_goes() -> None:
    taken = list(looking(iter(lane_requests(100))))
    first = taken[0][1][Source.TRAINING]
    assert first == list(range(10))
    current: list[int] = []
    for request, blocks in taken:
        current = current if blocks is None else blocks[Source.TRAINING]
        assert request.indices[0] // 10 == current[0]
        assert len(current) <= 11
    assert sum(blocks is not None for _, blocks in taken) < 70, "told only where it changes"


def test_two_sources_of_one_set_share_its_memory() -> None:
    shards: Any = FewBlocks(limit=1000)
    sources = (Source.TRAINING, Source.VALIDATION)
    requests = [Request(sources[number % 2], 0, (10 * number,), 0) for number in range(100)]
    _, blocks = next(iter(BlockPrefetch(iter(requests), dict.fromkeys(sources, shards))))
    assert blocks is not None
    assert [len(blocks[source]) for source in sources] == [5, 5]


def test_at_least_the_next_requests_of_every_lane_are_looked_at() -> None:
    by_lane = [lane_requests(30, lane, 10_000 * lane) for lane in range(4)]
    requests = [request for step in zip(*by_lane, strict=True) for request in step]
    _, blocks = next(looking(iter(requests), limit=1))
    assert {1000 * lane for lane in range(4)} <= set(blocks[Source.TRAINING])


def test_the_plan_is_not_run_through_in_advance() -> None:
    drawn = []

    def endless() -> Iterator[Request]:
        for number in range(10**9):
            drawn.append(number)
            yield Request(Source.TRAINING, 0, (3,), 0)

    assert len(list(islice(looking(endless()), 5))) == 5
    assert len(drawn) <= MOST_REQUESTS + 5


def streams(lanes: int, accumulate: int, steps: int) -> list[Request]:
    """Every lane reads from one block of its own, in micro-batches."""
    return [
        Request(Source.TRAINING, step, (10 * lane,), lane)
        for step in range(steps)
        for lane in range(lanes)
        for _ in range(accumulate)
    ]


@pytest.mark.parametrize(("lanes", "accumulate"), [(8, 1), (8, 4), (3, 300), (1, 4)])
def test_the_block_that_a_lane_is_in_stays_expected_however_many_micro_batches_the_others_read(
    lanes: int, accumulate: int
) -> None:
    began: list[int] = []
    before: set[int] = set()
    for _, blocks in looking(iter(streams(lanes, accumulate, steps=6)), limit=1):
        if blocks is not None:
            began.extend(set(blocks[Source.TRAINING]) - before)
            before = set(blocks[Source.TRAINING])
    assert sorted(began) == list(range(lanes)), "each is read once"


def test_looking_at_two_turns_of_every_lane_draws_no_more_than_these() -> None:
    drawn = []

    def counted() -> Iterator[Request]:
        for request in streams(4, 10, steps=100):
            drawn.append(request)
            yield request

    assert len(list(islice(looking(counted(), limit=1), 11))) == 11
    assert len(drawn) <= 10 * 4 * 3 + 1


def test_a_run_tells_what_waiting_for_its_shards_depends_on(folder: Path) -> None:
    spec = JobSpec(task="a:A", batch_size=8, lanes=2, steps=1)
    shards = Shards(folder, decode=len, window=12, cache={"folder": str(folder / "cache")}, cache_key="v1")
    reading = BlockSampler.of(spec, shards, len(shards)).describe()["data"]["reading"]
    flags = {name: reading[name] for name in ("remote", "decode", "columns", "cache")}
    assert flags == {"remote": False, "decode": True, "columns": False, "cache": True}
    assert reading["window_bytes"] == int(shards.index.sizes.sum()) * 12 // len(shards)
    assert json.loads(json.dumps(reading)) == reading


# --- waiting


@pytest.mark.parametrize(("loaders", "kind"), [(0, "text"), (1, "text"), (0, "parquet")])
def test_whoever_waits_for_data_hears_of_the_end_of_the_generation(
    loaders: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that does not come is waited for by the worker, by the thread of batches or by a loader."""
    write_shards(kind, tmp_path)
    save_index(build_index(str(tmp_path)), tmp_path / NAME)
    let_go = threading.Event()

    def hold_up(*_: object) -> Any:
        # By a thread that reads ahead or, if it is faster, by whoever needs the block: either waits as for a store.
        over = monotonic() + 30
        while not let_go.wait(CHECK_EVERY):
            check_interrupted()
            assert monotonic() < over
        raise Unreachable("it did not come")

    monkeypatch.setattr(ShardBlocks, "read", hold_up)
    looks = []

    def check() -> None:
        looks.append(monotonic())
        if len(looks) == 2:
            raise GenerationOver("generation 1 is over")

    requests = plan(48)
    began = monotonic()
    decode = None if kind == "parquet" else len
    try:
        with feeding(tmp_path, loaders, requests, decode=decode, check=check) as feed:
            with pytest.raises(GenerationOver, match="generation 1 is over"):
                feed.next(requests[0])
            feed.close()
            assert not let_go.is_set()
            assert monotonic() - began < 20, "long before the block came"
            let_go.set()
    finally:
        let_go.set()
    assert len(looks) == 2
