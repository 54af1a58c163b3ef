import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.reference import bits, reference_sum, wide_values
from collectives.rings import everywhere, generation, memory_links, memory_rings, ring_of
from memory_link import memory_link_pair
from quorate.collectives.ring import REDUCE_CHANNEL, Ring
from quorate.core.digests import Buffer
from quorate.core.errors import FrameError, LeaseExpired, PeerLost
from quorate.lanes import chunks
from quorate.lanes.chunks import host_lanes
from quorate.wire.link import Deadline, Link, Tag
from wire.pairs import Waiting, wait_until, within

EVERY_CASE = [(lanes, workers) for lanes in range(1, 9) for workers in range(1, lanes + 1)]


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def sum_everywhere(rings: list[Ring], lane_values: list[torch.Tensor], step: int = 1) -> list[torch.Tensor]:
    hosting = host_lanes(len(lane_values), len(rings))

    def work(position: int, ring: Ring) -> torch.Tensor:
        # Not a number: whatever is not written shows.
        total = torch.full_like(lane_values[0], -77)
        ring.all_reduce(step, 0, [lane_values[lane] for lane in hosting[position]], total)
        return total

    return everywhere(rings, work)


@pytest.mark.parametrize(("lanes", "workers"), EVERY_CASE)
def test_the_sum_has_the_same_bits_on_any_number_of_workers(lanes: int, workers: int) -> None:
    lane_values = wide_values(lanes, 1001, seed=lanes)
    expected = bits(reference_sum(lane_values))
    with memory_rings(lanes, workers) as rings:
        for step in (1, 2):
            assert {bits(total) for total in sum_everywhere(rings, lane_values, step)} == {expected}


def test_another_order_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lane_values = wide_values(4, 1001, seed=1)
    expected = bits(reference_sum(lane_values))
    monkeypatch.setattr(chunks, "summation_order", lambda chunk, lanes: tuple(range(lanes)))
    with memory_rings(4, 2) as rings:
        assert expected not in {bits(total) for total in sum_everywhere(rings, lane_values)}


PATTERNS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


@st.composite
def lanes_of_any_bits(draw: st.DrawFn) -> list[torch.Tensor]:
    """Any finite bit pattern of any type, in awkward lengths; many zeros of both signs."""
    lanes = draw(st.integers(1, 6))
    length = draw(st.integers(0, 13))
    dtype = draw(st.sampled_from(list(PATTERNS)))
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(PATTERNS[dtype])
    size = (lanes, length)
    patterns = torch.randint(limits.min, limits.max, size, generator=generator, dtype=PATTERNS[dtype])
    values = patterns.view(dtype)
    zeros = torch.where(patterns % 2 == 0, -0.0, 0.0).to(dtype)
    scarce = torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return list(torch.where(torch.isfinite(values) & ~scarce, values, zeros))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lane_values=lanes_of_any_bits())
def test_the_sum_is_the_definition_bit_for_bit(data: st.DataObject, lane_values: list[torch.Tensor]) -> None:
    workers = data.draw(st.integers(1, len(lane_values)))
    with memory_rings(len(lane_values), workers) as rings:
        totals = sum_everywhere(rings, lane_values)
    # Overflow to infinities of both signs gives a NaN, whose payload IEEE 754 leaves open.
    expected = reference_sum(lane_values).nan_to_num(nan=1.5, posinf=None, neginf=None)
    for total in totals:
        assert bits(total.nan_to_num(nan=1.5, posinf=None, neginf=None)) == bits(expected)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_sum_of_negative_zeros_keeps_its_sign(workers: int) -> None:
    with memory_rings(3, workers) as rings:
        for total in sum_everywhere(rings, [torch.full((5,), -0.0) for _ in range(3)]):
            assert torch.signbit(total).all()


def test_whole_numbers_are_summed_too() -> None:
    lane_values = [torch.arange(7) * 10**lane for lane in range(3)]
    with memory_rings(3, 2) as rings:
        for total in sum_everywhere(rings, lane_values):
            assert total.tolist() == [111 * i for i in range(7)]


def test_lane_values_are_left_as_they_were() -> None:
    lane_values = wide_values(4, 50, seed=2)
    before = [bits(value) for value in lane_values]
    with memory_rings(4, 2) as rings:
        sum_everywhere(rings, lane_values)
    assert [bits(value) for value in lane_values] == before


@pytest.mark.parametrize("workers", range(1, 7))
def test_everyone_gathers_everyones_payload_in_ring_order(workers: int) -> None:
    with memory_rings(6, workers) as rings:
        for step in (1, 2):
            gathered = everywhere(rings, lambda i, ring, step=step: ring.gather(step, 0, b"" if i == 1 else b"x" * i))  # type: ignore[misc]
            assert gathered == [tuple(b"" if i == 1 else b"x" * i for i in range(workers))] * workers


def test_exchanges_of_both_kinds_follow_each_other() -> None:
    def work(position: int, ring: Ring) -> list[object]:
        results: list[object] = []
        for step in range(20):
            total = torch.empty(5)
            ring.all_reduce(step, 0, [torch.full((5,), float(position + step))], total)
            results += [total.tolist(), ring.gather(step, 0, bytes([position]))]
            # The caller may use its tensor again as soon as it has it.
            total.fill_(-1)
            ring.all_reduce(step, 1, [torch.ones(5)], total)
            results.append(total.tolist())
        return results

    with memory_rings(3, 3) as rings:
        expected = [[[3.0 * step + 3] * 5, (b"\0", b"\1", b"\2"), [3.0] * 5] for step in range(20)]
        assert everywhere(rings, work) == [[item for step in expected for item in step]] * 3


def test_workers_that_sum_different_things_are_told_apart() -> None:
    with memory_rings(2, 2) as rings:

        def work(position: int, ring: Ring) -> BaseException:
            with pytest.raises((FrameError, PeerLost)) as error:
                ring.all_reduce(1, position, [torch.ones(4)], torch.empty(4))
            return error.value

        assert any(isinstance(error, FrameError) and "index" in str(error) for error in everywhere(rings, work))


class Muted:
    """A link on which a worker sends a few frames and then fails in its own way."""

    def __init__(self, link: Link, error: BaseException, sends: int) -> None:
        self._link = link
        self._error = error
        self._sends = sends
        self.send_failed = threading.Event()

    def send(self, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        if not self._sends:
            self.send_failed.set()
            raise self._error
        self._sends -= 1
        self._link.send(tag, payload, deadline)

    def receive(self, tag: Tag, deadline: Deadline) -> bytearray:
        return self._link.receive(tag, deadline)

    def receive_into(self, tag: Tag, buffer: Buffer, deadline: Deadline) -> None:
        self._link.receive_into(tag, buffer, deadline)

    def close(self) -> None:
        self._link.close()


@pytest.mark.parametrize("error", [LeaseExpired("no word for 4.0 s"), PeerLost("worker 11", "reset"), OSError("disk")])
@pytest.mark.parametrize("sends", [0, 1])
def test_an_error_of_the_sending_thread_surfaces_in_the_calling_one_with_its_own_type(
    error: Exception, sends: int
) -> None:
    members = generation(2, 2)
    to_next, far_next = memory_link_pair(("worker 10", "worker 11"))
    from_previous, far_previous = memory_link_pair(("worker 10", "worker 11"))
    muted = Muted(to_next, error, sends)
    ring = ring_of(members, 10, from_previous, muted, within(100))
    with ThreadPoolExecutor(1) as threads:
        # The far side takes what it is sent but sends nothing: without the error this would wait for 30 s.
        summing = threads.submit(ring.all_reduce, 1, 0, [torch.ones(8)], torch.empty(8))
        while sends and not muted.send_failed.is_set() and not summing.done():
            tag = Tag(members.id, 1, REDUCE_CHANNEL, 3)
            far_next.receive(tag, within(100))
            far_previous.send(Tag(members.id, 1, REDUCE_CHANNEL, 2), bytes(16), within(100))
            assert muted.send_failed.wait(60)
        with pytest.raises(type(error)) as raised:
            summing.result(60)
    assert raised.value is error
    for far in (far_next, far_previous):
        with pytest.raises(PeerLost, match="worker 10 is gone"):
            far.receive(Tag(members.id, 1, REDUCE_CHANNEL, 0), within(100))
    with pytest.raises(type(error)):
        ring.gather(2, 0, b"")


@pytest.mark.parametrize("workers", range(2, 6))
def test_a_worker_that_dies_before_it_sent_anything_ends_the_exchange_on_the_whole_ring(workers: int) -> None:
    links = memory_links(workers)
    members = generation(workers, workers)
    survivors = [ring_of(members, 10 + i, *links[i], within(100)) for i in range(workers - 1)]
    for link in links[-1]:
        assert link is not None
        link.close()

    def work(position: int, ring: Ring) -> str:
        with pytest.raises(PeerLost) as error:
            ring.all_reduce(1, 0, [torch.ones(100)], torch.empty(100))
        return error.value.peer

    assert f"worker {9 + workers}" in everywhere(survivors, work)


def test_closing_from_another_thread_ends_an_exchange() -> None:
    waiting = Waiting(within(30))
    ring = ring_of(generation(2, 2), 10, *memory_links(2)[0], waiting)
    with ThreadPoolExecutor(1) as threads:
        gathering = threads.submit(ring.gather, 1, 0, b"")
        assert waiting.begun.wait(60)
        ring.close()
        with pytest.raises(PeerLost, match="closed on this side"):
            gathering.result(60)


def test_an_exchange_closed_before_its_last_send_has_failed_though_its_sum_is_complete() -> None:
    members = generation(2, 2)
    to_next, _ = memory_link_pair(("worker 10", "worker 11"))
    from_previous, far = memory_link_pair(("worker 10", "worker 11"))
    ring = ring_of(members, 10, from_previous, to_next, within(100))
    with ThreadPoolExecutor(1) as threads:
        summing = threads.submit(ring.all_reduce, 1, 0, [torch.ones(2)], torch.empty(2))
        # Everything that worker 11 has to give, while it takes nothing.
        for hop, chunk in ((1, 0), (2, 1)):
            far.send(Tag(members.id, 1, REDUCE_CHANNEL, hop * 2 + chunk), bytes(4), within(100))
        ring.close()
        with pytest.raises(PeerLost, match=r"worker 11 .*is gone: the link was closed on this side"):
            summing.result(60)


def test_a_neighbour_that_stops_without_dying_is_lost_when_the_deadline_is_over_and_nobody_touches_the_total() -> None:
    links = memory_links(2)
    ring = ring_of(generation(2, 2), 10, *links[0], within(0.1))
    with pytest.raises(PeerLost, match="worker 11 is gone: no frame for"):
        ring.all_reduce(1, 0, [torch.ones(4)], torch.empty(4))
    wait_until(lambda: not any(thread.name == "quorate-ring-sender" for thread in threading.enumerate()), seconds=0.001)
