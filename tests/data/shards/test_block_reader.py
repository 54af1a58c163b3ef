"""Blocks are read ahead in their order and within their memory; nothing that goes wrong is waited for in vain."""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from children import in_child
from command import await_condition
from quorate.data.bad_sample import Unreachable
from quorate.data.datasets import LIMIT
from quorate.data.threads import interruptible
from quorate.shards.blocks import BlockReader, KeptBlocks
from quorate.shards.formats.format import DamagedBlock, ShardError

SIZE = 100


class Content:
    def __init__(self, block: int, nbytes: int) -> None:
        self.block = block
        self.nbytes = nbytes


class FakeBlocks:
    """Blocks of 100 bytes. Each may be held up, be damaged, or be out of reach."""

    def __init__(self, swells: int = 1, remote: bool = False) -> None:
        self.is_remote = remote
        self.swells = swells
        self.read_by: list[tuple[int, str]] = []
        self.damaged: set[int] = set()
        self.away: set[int] = set()
        self.held_up: dict[int, threading.Event] = {}
        self.closed = False

    def size(self, block: int) -> int:
        return SIZE

    def read(self, block: int) -> Any:
        self.read_by.append((block, threading.current_thread().name))
        if block in self.held_up:
            assert self.held_up[block].wait(60)
        if block in self.damaged:
            raise DamagedBlock("a.tar", f"byte {block}", "it has changed")
        if block in self.away:
            raise Unreachable("a.tar is away")
        return Content(block, SIZE * self.swells)

    def close(self) -> None:
        self.closed = True
        for event in self.held_up.values():
            event.set()

    @property
    def order(self) -> list[int]:
        return [block for block, _ in self.read_by]


class LimitedReader(BlockReader):
    """A reader of made-up blocks, with a limit of its own."""

    def __init__(self, blocks: Any, limit: int = LIMIT) -> None:
        super().__init__(lambda: blocks)
        self.limit = limit

    def here(self, limit: int | None = None) -> KeptBlocks:
        return super().here(self.limit)


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[BlockReader, FakeBlocks]]]:
    readers: list[BlockReader] = []

    def make(limit: int = 10 * SIZE, **options: Any) -> tuple[BlockReader, FakeBlocks]:
        blocks = FakeBlocks(**options)
        reader = LimitedReader(blocks, limit)
        readers.append(reader)
        return reader, blocks

    yield make
    for reader in readers:
        reader.close()


Make = Callable[..., tuple[BlockReader, FakeBlocks]]


def test_a_block_is_read_once_however_often_it_is_asked_for(made: Make) -> None:
    reader, blocks = made()
    assert [reader.here().get(number).block for number in (3, 5, 3, 5, 3)] == [3, 5, 3, 5, 3]
    assert blocks.order == [3, 5]
    assert len(reader.here().threads) == 0, "without a plan nothing is read ahead"


def test_wanted_blocks_are_read_by_threads_in_their_order(made: Make) -> None:
    reader, blocks = made()
    reader.here().prefetch([4, 2, 7])
    await_condition("the reader", lambda: reader.here().nbytes == 3 * SIZE)
    assert blocks.order[0] == 4
    assert {name for _, name in blocks.read_by} == {"shard-reader"}
    assert reader.here().get(7).block == 7
    assert len(blocks.order) == 3


def test_a_block_that_is_on_its_way_is_waited_for_and_not_read_twice(made: Make) -> None:
    reader, blocks = made()
    blocks.held_up[1] = threading.Event()
    reader.here().prefetch([1])
    await_condition("the reader", lambda: blocks.order == [1])
    threading.Timer(0.1, blocks.held_up[1].set).start()
    assert reader.here().get(1).block == 1
    assert blocks.order == [1]


def test_reading_ahead_stops_where_the_memory_ends_and_goes_on_when_blocks_are_done(made: Make) -> None:
    reader, blocks = made(limit=3 * SIZE)
    reader.here().prefetch(range(10))
    await_condition("the reader", lambda: reader.here().nbytes == 3 * SIZE)
    assert sorted(blocks.order) == [0, 1, 2]
    reader.here().prefetch(range(2, 10))
    await_condition("the reader", lambda: len(blocks.order) == 5)
    assert sorted(blocks.order) == [0, 1, 2, 3, 4]
    assert reader.here().nbytes == 3 * SIZE


def test_what_a_block_takes_is_learnt_from_those_before(made: Make) -> None:
    """Compressed blocks swell; ten of them would not fit where ten of their bytes do."""
    reader, blocks = made(limit=12 * SIZE, swells=5)
    reader.here().get(0)
    reader.here().prefetch(range(10))
    await_condition("the reader", lambda: reader.here().nbytes == 10 * SIZE)
    reader.here().get(0)
    assert sorted(blocks.order) == [0, 1]


def test_what_is_read_at_the_same_time_is_kept_also_where_it_is_too_much(
    made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader, blocks = made(limit=2 * SIZE)
    reader.here().prefetch([])
    for _ in range(3):
        for block in range(4):
            reader.here().prefetch(range(4))
            assert reader.here().get(block).block == block
    assert sorted(blocks.order) == [0, 1, 2, 3]
    assert "smaller window" in caplog.text
    reader.here().prefetch([9])
    reader.here().get(9)
    assert reader.here().nbytes <= 2 * SIZE, "and forgotten when it is not"


def test_without_a_plan_the_blocks_that_were_used_last_are_kept(made: Make) -> None:
    reader, blocks = made(limit=2 * SIZE)
    for block in (1, 2, 1, 3, 1, 2):
        reader.here().get(block)
    assert blocks.order == [1, 2, 3, 2]


def test_a_damaged_block_is_read_once_and_tells_it_to_all_its_samples(made: Make) -> None:
    reader, blocks = made()
    blocks.damaged.add(2)
    reader.here().prefetch([2])
    for _ in range(3):
        with pytest.raises(DamagedBlock, match=r"a\.tar, byte 2"):
            reader.here().get(2)
    assert blocks.order == [2]


def test_what_is_out_of_reach_ahead_is_tried_again_by_whoever_needs_it(made: Make) -> None:
    reader, blocks = made()
    blocks.away.add(2)
    reader.here().prefetch([2, 3])
    await_condition("the reader", lambda: 3 in blocks.order and reader.here().nbytes == SIZE)
    assert blocks.order.count(2) == 1, "ahead it is not tried for ever"
    with pytest.raises(Unreachable):
        reader.here().get(2)
    blocks.away.clear()
    assert reader.here().get(2).block == 2


def test_closing_ends_the_threads_also_one_that_waits(made: Make) -> None:
    reader, blocks = made()
    blocks.held_up[1] = threading.Event()
    reader.here().prefetch([1])
    await_condition("the reader", lambda: blocks.order == [1])
    before = threading.active_count()
    reader.close()
    assert blocks.closed
    assert threading.active_count() < before
    assert len(reader.here().threads) == 0
    assert reader.here().nbytes == 0


def test_a_reader_that_is_forgotten_ends_its_threads(made: Make) -> None:
    blocks = FakeBlocks()
    readers = [LimitedReader(blocks)]
    readers[0].here().prefetch([1])
    await_condition("the block", lambda: readers[0].here().nbytes == SIZE)
    names = [thread.name for thread in threading.enumerate()].count("shard-reader")
    readers.clear()
    await_condition("the end", lambda: [each.name for each in threading.enumerate()].count("shard-reader") < names)


def test_a_forked_child_begins_with_nothing_and_waits_for_no_thread_of_its_parent(made: Make) -> None:
    reader, blocks = made()
    blocks.held_up[1] = threading.Event()
    reader.here().prefetch([1, 2])
    await_condition("the reader", lambda: reader.here().nbytes == SIZE and 1 in blocks.order)

    def work() -> bool:
        blocks.held_up.clear()
        blocks.read_by.clear()
        signal.alarm(100)
        empty = reader.here().nbytes == 0 and len(reader.here().threads) == 0
        got = reader.here().get(1).block == 1 and reader.here().get(2).block == 2
        reader.here().prefetch([5])
        await_condition("the block", lambda: reader.here().nbytes == 3 * SIZE, 60.0)
        return empty and got and 5 in blocks.order

    assert in_child(work) == 0


def test_signals_go_to_the_main_thread(made: Make) -> None:
    reader, blocks = made()
    blocks.held_up[1] = threading.Event()
    reader.here().prefetch([1])
    await_condition("the reader", lambda: len(reader.here().threads) == 1 and blocks.order == [1])
    thread = next(each for each in threading.enumerate() if each.name == "shard-reader")
    with open(f"/proc/self/task/{thread.native_id}/status") as status:  # noqa: PTH123
        blocked = next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
    assert blocked >> (signal.SIGTERM - 1) & 1
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_whoever_waits_for_a_block_hears_that_nobody_wants_it_any_more(made: Make) -> None:
    """Also where the code of a task catches what its data raise; the block itself comes later."""
    reader, blocks = made()
    blocks.held_up[1] = threading.Event()
    reader.here().prefetch([1])
    await_condition("the reader", lambda: blocks.order == [1])

    def check() -> None:
        raise RuntimeError("the generation is over")

    def get() -> Any:
        try:
            return reader.here().get(1)
        except Exception:
            return "something else instead"

    with pytest.raises(RuntimeError, match="the generation is over"), interruptible(check):
        get()
    blocks.held_up[1].set()
    assert get().block == 1
    assert blocks.order == [1]


def test_shard_errors_can_be_copied() -> None:
    import copy

    error: ShardError = DamagedBlock("a", "byte 1", "why")
    assert str(copy.copy(error)) == str(error)
