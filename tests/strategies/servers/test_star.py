from functools import partial
from itertools import product

import pytest
import torch

from collectives.reference import bits
from quorate.core.errors import FrameError, PeerLost
from quorate.strategies.servers import exchange
from quorate.strategies.servers.exchange import ALONE, Star
from quorate.strategies.servers.links import Spokes
from strategies.servers.stars import Case, at_all, case, stars

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
MIXED = [(5, F32), (0, F32), (ALONE // 4 + 3, F32), (1, F32), (300, F64), (17, BF16), (9, BF16), (2, F32), (0, F64)]


def step(given: Case, number: int, position: int, star: Star) -> dict[int, torch.Tensor]:
    """One step of a member, in which the sums are the new values: those a worker pulls, or a server has summed."""
    if position in given.workers:
        star.push(number)
        values = given.empty(range(len(given.holders)))
        star.pull(number, values)
        return values
    star.receive(number)
    totals = given.empty(given.held(position))
    star.add_up(number, totals)
    star.publish(number, {block: totals[block] for block in given.led(position)})
    return totals


@pytest.mark.parametrize(
    ("workers", "servers", "replicas"),
    [each for each in product((1, 2, 3, 4), (1, 2, 3), (1, 2)) if each[1:] != (1, 2)],
)
def test_sums_are_those_of_the_ring_at_every_server_and_come_to_every_worker(
    workers: int, servers: int, replicas: int
) -> None:
    given = case(MIXED, 5, workers, servers, replicas, bucket_mb=0.002)
    expected = given.sums()
    with stars(given) as members:
        for number in (1, 2):
            for position, found in enumerate(at_all(members, partial(step, given, number))):
                assert set(found) == set(given.held(position) if position in given.servers else expected)
                for block, value in found.items():
                    empty = torch.full_like(value, 7)
                    assert bits(value) == bits(expected[block] if value.numel() else empty)


@pytest.mark.parametrize("alone", [1, ALONE])
def test_bytes_are_counted_both_ways(monkeypatch: pytest.MonkeyPatch, alone: int) -> None:
    monkeypatch.setattr(exchange, "ALONE", alone)
    given = case([(10, F32), (6, F64), (3, F32)], 3, 2, 2, replicas=2)
    size = 13 * 4 + 6 * 8
    with stars(given) as members:
        at_all(members, partial(step, given, 1))
    sent = [star.spokes.bytes_sent for star in members]
    assert sent[:2] == [2 * 2 * size, 1 * 2 * size], "each server holds everything"
    assert sum(sent[2:]) == 2 * size
    assert [star.spokes.bytes_received for star in members] == [size, size, 3 * size, 3 * size]


def test_new_values_of_an_older_step_are_refused_on_both_ends() -> None:
    given = case([(10, F32)], 1, 1, 1, replicas=1)
    with stars(given) as members:

        def work(position: int, star: Star) -> None:
            if position == 0:
                with pytest.raises(FrameError, match=r"step 4, .*expected was .*step 5"):
                    star.pull(5, given.empty([0]))
            else:
                with pytest.raises(PeerLost, match="worker 10 is gone"):
                    star.publish(4, given.empty([0]))

        at_all(members, work)


def test_gradients_where_the_other_end_sees_another_placement_are_refused() -> None:
    given = case([(10, F32), (10, F32)], 1, 1, 2, replicas=1)
    with stars(given) as members:
        swapped = case([(10, F32), (10, F32)], 1, 1, 2, replicas=1)
        swapped.holders.reverse()
        other = Star(members[0].spokes, given.plan, swapped.holders, {0: given.values[0]})

        def work(position: int, star: Star) -> None:
            if position == 0:
                with pytest.raises(PeerLost):
                    other.push(1)
            else:
                with pytest.raises((FrameError, PeerLost)):
                    star.receive(1)

        at_all(members, work)


@pytest.mark.parametrize("gone", [0, 1, 2, 3])
def test_a_member_that_is_gone_is_a_lost_peer_to_everybody(gone: int) -> None:
    given = case([(ALONE, F32), (10, F32), (7, F32)], 4, 2, 2, replicas=1)
    with stars(given, seconds=30) as members:
        members[gone].spokes.close()

        def work(position: int, star: Star) -> str:
            if position != gone:
                with pytest.raises(PeerLost) as lost:
                    step(given, 1, position, star)
                return str(lost.value)
            return ""

        told = at_all(members, work)
        name = f"worker {given.generation.members[gone].worker} is gone"
        assert any(name in each for each in told)


def test_the_one_that_is_to_blame_is_named() -> None:
    given = case([(4, F32)], 1, 1, 1, replicas=1)
    with stars(given) as members:
        blamed = PeerLost("worker 99", "its host is silent")
        spokes = Spokes(given.generation, 10, members[0].spokes._links, lambda: 0.0, lambda _: blamed)
        star = Star(spokes, given.plan, given.holders, {})
        with pytest.raises(PeerLost, match="worker 99"):
            star.pull(1, given.empty([0]))


def test_a_tensor_that_is_not_flat_is_refused() -> None:
    given = case([(4, F32)], 1, 1, 1, replicas=1)
    with stars(given) as members, pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        members[0].pull(1, {0: torch.zeros(2, 2)})


def test_another_order_of_lanes_shows_in_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would prove nothing."""
    given = case([(40, F32)], 5, 2, 1, replicas=1)

    def in_lane_order(lanes: list[torch.Tensor], _: object, total: torch.Tensor) -> None:
        total.copy_(sum(lanes[1:], lanes[0]))

    monkeypatch.setattr(exchange, "add_up_block", in_lane_order)
    with stars(given) as members:
        found = at_all(members, partial(step, given, 1))
    assert bits(found[0][0]) != bits(given.sums()[0])
