"""A feed of shards: the same batches from any number of loaders, read ahead block by block, a lane by one loader."""

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data.shards.shard_files import small_blocks, write_shards
from quorate.core.errors import JobError, UserCodeError
from quorate.data.collate import collate
from quorate.data.feed import Batch, Feed
from quorate.data.lookahead import MOST_REQUESTS, Dealer, Lookahead
from quorate.data.reading import Request, Source
from quorate.data.samples import Samples
from quorate.data.shards.dataset import Shards
from quorate.data.shards.index import NAME
from quorate.data.shards.indexing import build_index

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
    write_shards("text", tmp_path)
    build_index(str(tmp_path)).save(tmp_path / NAME)
    return tmp_path


@contextlib.contextmanager
def feeding(folder: Path, loaders: int, requests: list[Request], decode: Any = who, **options: Any) -> Iterator[Feed]:
    sets: dict[Source, Any] = {Source.TRAINING: Shards(folder, decode=decode), Source.VALIDATION: Shards(folder)}
    feed = Feed(Samples(sets, collate, 5, **options), iter(requests), loaders, 1)
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
    assert [batch.samples for batch in loaded] == [request.indices for request in plan(48)]
    for one, other in zip(alone[:12], loaded[:12], strict=True):
        assert one.content[0] == other.content[0]
        assert torch.equal(one.content[2], other.content[2])
    assert [batch.content for batch in alone[12:]] == [batch.content for batch in loaded[12:]]


@pytest.mark.parametrize("loaders", [2, 8])
def test_a_lane_is_always_read_by_the_same_loader(loaders: int, folder: Path) -> None:
    by_lane: dict[int, set[int]] = {}
    for request, batch in zip(plan(48)[:12], read(folder, loaders), strict=False):
        by_lane.setdefault(request.lane, set()).update(batch.content[1].tolist())
    assert all(len(pids) == 1 for pids in by_lane.values())
    assert os.getpid() not in set.union(*by_lane.values())
    assert len(set.union(*by_lane.values())) == min(loaders, LANES)


@pytest.mark.parametrize("loaders", [0, 2])
def test_bad_samples_are_told_beside_their_batch(loaders: int, folder: Path) -> None:
    def refuse(record: str) -> str:
        if record.startswith(("0 ", "2 ", "3 ")):
            raise ValueError("torn")
        return record[:4]

    batches = read(folder, loaders, decode=refuse, skips=True)
    assert [(batch.samples, batch.bad) for batch in batches[:4]] == [
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
        shards = feed._samples.shards[Source.TRAINING]
        assert shards._reader.threads > 0
        feed.close()
        assert not shards._reader._shelf._wanted


# --- looking ahead, without anything being read


class FewBlocks:
    """Ten samples a block, 100 bytes each block."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit

    def blocks_of(self, indices: tuple[int, ...]) -> list[int]:
        return sorted({index // 10 for index in indices})

    def block_bytes(self, block: int) -> int:
        return 100


def looking(requests: Iterator[Request], limit: int = 1000) -> Iterator[tuple[Request, Any]]:
    shards: Any = {Source.TRAINING: FewBlocks(limit)}
    return iter(Lookahead(requests, shards))


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


def test_lanes_are_dealt_evenly_and_no_request_is_lost() -> None:
    requests = [Request(Source.TRAINING, 0, (number,), number % 5) for number in range(1000)]
    dealer = Dealer(iter(requests), 2)
    dealt = [list(dealer.requests(loader)) for loader in range(2)]
    assert sorted(request.indices[0] for each in dealt for request in each) == list(range(1000))
    assert [{request.lane for request in each} for each in dealt] == [{0, 2, 4}, {1, 3}]
    assert all(each == sorted(each, key=lambda request: request.indices) for each in dealt)


def test_there_are_no_more_loaders_than_lanes_that_read() -> None:
    """One without a request would look for it through the whole of an endless plan."""

    def endless() -> Iterator[Request]:
        number = 0
        while True:
            yield Request(Source.TRAINING, 0, (number,), number % 2)
            number += 1

    dealer = Dealer(endless(), 8)
    assert dealer.loaders == 2
    assert [next(dealer.requests(loader)).lane for loader in range(2)] == [0, 1]
