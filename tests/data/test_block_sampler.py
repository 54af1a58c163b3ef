"""The order of blocks: every sample exactly once an epoch, each block in one go, and never a list of all samples."""

import tracemalloc
from collections import Counter
from itertools import chain, pairwise
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.block_cases import Case, blocks_of, blocks_of_samples, cases, read_by, stream
from data.jobs import job
from quorate.core.errors import TaskError
from quorate.core.generation import Cursor
from quorate.data.block_sampler import BlockOrder, BlockSampler, shuffle
from quorate.data.ledger import Tally, total
from quorate.data.sampler import EvaluationPlan, planned_requests
from quorate.lanes.chunks import host_lanes
from quorate.observe.events import TrainingBlocks


@given(cases(), st.data())
def test_workers_that_go_on_in_the_middle_read_what_is_left(case: Case, data: st.DataObject) -> None:
    """One number of workers up to some step and another from there on read what one worker reads alone."""
    records, window, keys = case
    lanes, order = keys["lanes"], stream(records, window, **keys)
    evaluation = EvaluationPlan(0, 1, lanes, "end")
    middle = data.draw(st.integers(0, order.total_steps))
    alone = Counter(planned_requests(order, evaluation, range(lanes), Cursor()))
    left = Counter(planned_requests(order, evaluation, range(lanes), Cursor(middle)))
    both: Counter[Any] = Counter()
    for hosted in host_lanes(lanes, data.draw(st.integers(1, lanes))):
        both.update(planned_requests(stream(records, window, **keys), evaluation, hosted, Cursor()))
        both.subtract(planned_requests(stream(records, window, **keys), evaluation, hosted, Cursor(middle)))
    for hosted in host_lanes(lanes, data.draw(st.integers(1, lanes))):
        after = Counter(planned_requests(stream(records, window, **keys), evaluation, hosted, Cursor(middle)))
        assert after <= left
        both.update(after)
    assert both == alone


@given(cases())
def test_a_lane_reads_each_of_its_blocks_in_one_go(case: Case) -> None:
    """The parts of the lanes lie one after the other in the line, so that few blocks are shared."""
    records, window, keys = case
    order, of_sample = stream(records, window, **keys), blocks_of_samples(records)
    parts = [order.part(lane) for lane in range(keys["lanes"])]
    assert parts[0].start == 0
    assert all(before.stop == after.start for before, after in pairwise(parts))
    for epoch in (0, 1):
        pairs = 0
        for lane, part in enumerate(parts):
            used, blocks = read_by(order, lane, epoch), blocks_of(order, epoch, lane).tolist()
            assert set(blocks) == {of_sample[sample] for sample in used}
            assert len(blocks) == len(set(blocks))
            pairs += len(blocks)
            places = {block: place for place, block in enumerate(blocks)}
            for start in range(0, len(part), window):
                before = {places[of_sample[sample]] for sample in used[:start]}
                now = {places[of_sample[sample]] for sample in used[start : start + window]}
                assert max(before, default=0) <= min(now)
            whole = Counter(of_sample[sample] for sample in used)
            assert all(whole[block] == records[block] for block in blocks[1:-1])
        assert pairs <= sum(count > 0 for count in records) + keys["lanes"]


@given(cases())
def test_a_window_of_one_reads_the_blocks_as_they_are(case: Case) -> None:
    records, _, keys = case
    order = stream(records, 1, **keys)
    line = order._order(1).samples(0, sum(records)).tolist()
    assert (
        list(chain.from_iterable(read_by(order, lane, 1) for lane in range(keys["lanes"])))
        == line[: order.part(keys["lanes"] - 1).stop]
    )
    for before, after in pairwise(line):
        assert after == before + 1 or blocks_of_samples(records)[after] != blocks_of_samples(records)[before]


@given(cases())
def test_where_a_lane_stands_is_what_it_has_read(case: Case) -> None:
    records, window, keys = case
    order, of_sample = stream(records, window, **keys), blocks_of_samples(records)
    for lane in range(keys["lanes"]):
        for step in range(order.total_steps + 1):
            position = order.position(step, lane)
            epoch = max(0, order.epoch_of(step))
            used = [of_sample[sample] for sample in read_by(order, lane, epoch)]
            assert (position.epoch, position.samples) == (epoch, len(used))
            done, left = used[: position.done], used[position.done :]
            blocks = position.blocks.tolist()
            assert blocks == blocks_of(order, epoch, lane).tolist()
            assert 0 <= position.finished <= position.begun <= len(blocks)
            assert not set(blocks[: position.finished]) & set(left)
            assert not set(blocks[position.begun :]) & set(done)
            assert set(done) <= set(blocks[: position.begun])
        assert order.position(order.total_steps, lane).done == len(order.part(lane))


def test_position_counts_the_steps_of_its_epoch() -> None:
    order = stream([10, 10, 10], 4, lanes=2, batch_size=10, epochs=2)
    assert [order.position(step, 0).done for step in range(7)] == [0, 5, 10, 15, 5, 10, 15]
    assert [order.position(step, 0).epoch for step in range(7)] == [0, 0, 0, 0, 1, 1, 1]


def test_other_epochs_and_seeds_have_other_orders_of_blocks_and_within_them() -> None:
    keys: dict[str, Any] = {"lanes": 2, "batch_size": 10, "epochs": 3}
    orders = [stream([5] * 40, 25, seed=seed, **keys) for seed in (1, 2)]
    lines = {tuple(order._order(epoch).blocks.tolist()) for order in orders for epoch in range(3)}
    assert len(lines) == 6
    alone = [stream([200], 25, seed=seed, **keys) for seed in (1, 2)]
    assert len({tuple(read_by(order, lane, epoch)) for order in alone for lane in (0, 1) for epoch in range(3)}) == 12
    whole = stream([200], 1000, **keys)
    assert read_by(whole, 0, 0) != sorted(read_by(whole, 0, 0)), "one window holds all, and shuffles it"
    assert sorted(read_by(whole, 0, 0)) == list(range(100))


def test_windows_of_one_lane_are_shuffled_each_in_its_own_way() -> None:
    order = stream([400], 20, lanes=1, batch_size=20, epochs=1)
    places = {tuple(sample - sample // 20 * 20 for sample in order.share(step, 0).tolist()) for step in range(1, 21)}
    assert len(places) == 20


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_a_shuffle_is_a_permutation_by_its_seed(count: int) -> None:
    assert sorted(shuffle(count, 5).tolist()) == list(range(count))
    assert (shuffle(count, 5) == shuffle(count, 5)).all()
    assert count < 7 or shuffle(count, 5).tolist() != shuffle(count, 6).tolist()


def test_a_shuffle_puts_everything_everywhere() -> None:
    """Each of 8 in each of 8 places, about as often as the others."""
    shuffles = numpy.array([shuffle(8, seed) for seed in range(4000)])
    counts = numpy.array([numpy.bincount(shuffles[:, place], minlength=8) for place in range(8)])
    assert counts.min() > 400
    assert counts.max() < 600


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_samples_of_a_piece_of_the_line(records: list[int], data: st.DataObject) -> None:
    order = BlockOrder.of(numpy.array(records, dtype=numpy.int64), 3)
    line = [sample for block in order.blocks for sample in range(sum(records[:block]), sum(records[: block + 1]))]
    start = data.draw(st.integers(0, len(line)))
    stop = data.draw(st.integers(start, len(line)))
    assert order.samples(start, stop).tolist() == line[start:stop]
    of_sample = blocks_of_samples(records)
    assert {int(order.blocks[place]) for place in order.span(start, stop)} == {of_sample[s] for s in line[start:stop]}


def test_too_few_samples_for_a_batch_are_refused_with_the_remedy() -> None:
    with pytest.raises(TaskError, match=r"has 5 samples, less than one batch .*batch_size of at most 5"):
        stream([2, 3], 4, lanes=2, batch_size=8, epochs=1)
    assert stream([2, 3], 4, lanes=2, batch_size=8, epochs=1, last_batch="keep").total_steps == 1


class InBlocks:
    def __init__(self, blocks: Any, window: Any) -> None:
        self.blocks, self.window = blocks, window


@pytest.mark.parametrize(
    ("blocks", "window", "text"),
    [
        ([3, 4], 5, r"hold 7 records, but its len\(\) is 10"),
        ([12, -2], 5, "list how many records each block has"),
        ([2.5, 7.5], 5, "list how many records each block has"),
        (10, 5, "list how many records each block has"),
        ([[5], [5, 0]], 5, "list how many records each block has"),
        ([5, 5], 0, "window of the training set"),
        ([5, 5], "8192", "window of the training set"),
    ],
)
def test_blocks_that_are_none_are_refused(blocks: Any, window: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        BlockSampler.of(job(lanes=2, batch_size=4, epochs=1), InBlocks(blocks, window), 10)


@pytest.mark.parametrize("blocks", [[5, 0, 5], (5, 5), numpy.array([5, 5], dtype=numpy.uint8)])
def test_blocks_may_be_any_list_of_whole_numbers(blocks: Any) -> None:
    order = BlockSampler.of(job(lanes=2, batch_size=4, epochs=1), InBlocks(blocks, 4), 10)
    assert order.samples == 10
    assert order.describe() == {"data": {"blocks": len(blocks), "window": 4}}


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (
            {"reading_facts": {"index": "/data/index.quorate", "digest": "ab"}},
            {"index": "/data/index.quorate", "digest": "ab"},
        ),
        pytest.param({"facts": {"license": "mine"}}, {}, id="an attribute of the user's own"),
    ],
)
def test_what_a_dataset_says_of_itself_is_told(own: dict[str, Any], told: dict[str, str]) -> None:
    dataset: Any = InBlocks([5, 5], 4)
    dataset.__dict__.update(own)
    order = BlockSampler.of(job(lanes=2, batch_size=4, epochs=1), dataset, 10)
    assert order.describe() == {"data": {"blocks": 2, "window": 4, **told}}
    dataset.reading_facts = {"license": "mine", "digest": "ab"}
    order = BlockSampler.of(job(lanes=2, batch_size=4, epochs=1), dataset, 10)
    assert TrainingBlocks.of(order.describe()) == TrainingBlocks(2, 4, digest="ab")


def test_a_hundred_million_samples_take_no_more_memory_than_their_blocks() -> None:
    records = numpy.full(100_000, 1000)
    records[::2] += 7
    records[1::2] -= 7
    spec = job(lanes=8, batch_size=1024, epochs=10)
    tracemalloc.start()
    try:
        order = BlockSampler(spec, records, 8192)
        late = order.steps_per_epoch * 9
        used = [order.micro_batches(step, lane) for step in range(late + 50, late + 60) for lane in range(8)]
        ends = order.micro_batches(order.total_steps, 7)
        dropped = order.dropped(9)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    samples = list(chain.from_iterable(chain.from_iterable(used)))
    assert len(set(samples)) == 10 * 1024
    assert min(samples) >= 0
    assert max(samples) < 100_000_000
    assert len(ends[0]) == 128
    assert len(dropped) == 100_000_000 % 1024
    assert peak < 30_000_000, f"{peak:,} bytes"


def test_the_tally_of_all_lanes_is_that_of_the_batch() -> None:
    order = stream([9, 4, 0, 30], 7, lanes=3, batch_size=9, epochs=1)
    for step in range(1, order.total_steps + 1):
        assert Tally.of(0, order.batch(step)) == total(Tally.of(0, order.share(step, lane)) for lane in range(3))
