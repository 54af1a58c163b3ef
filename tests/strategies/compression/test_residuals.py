"""What lanes hold back: it counts when its step is applied, and is found by whoever hosts the lane next."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from collectives.rings import memory_links, ring_of
from quorate.core.errors import LinkError, ResidualsLost
from quorate.core.generation import Cursor, Generation, GenerationId, Member
from quorate.lanes.buckets import TensorShape, plan_buckets
from quorate.strategies import state_copy as module
from quorate.strategies.compression.compressor import Compressor
from quorate.strategies.compression.methods import TopK
from quorate.strategies.compression.residuals import LaneMemory, Residuals
from quorate.training.activity import Activity
from wire.pairs import within

QUIET = Activity(lambda *_: None)
PLAN = plan_buckets([TensorShape(f"p{i}", "torch.float32", 4, size) for i, size in enumerate((6, 4))], 25)
BOTH = 0b11
LANES = 4


def compressor() -> Compressor:
    return Compressor(TopK(0.1), PLAN, LANES)


def gradient(scale: float = 1.0) -> list[torch.Tensor]:
    return [torch.arange(1.0, 11.0) * scale]


def held(residuals: Residuals, lane: int = 0) -> list[float]:
    tensors = residuals.state().tensors
    return [round(value, 4) for value in tensors[f"lanes.{lane}.0.0"].tolist()]


def shared() -> int:
    return os.memfd_create("lanes for a test", os.MFD_CLOEXEC)


def after_steps(residuals: Residuals, steps: Sequence[int], lanes: Sequence[int] = (0,)) -> Residuals:
    for step in steps:
        for lane in lanes:
            residuals.encode([compressor()], step, lane, BOTH, gradient(lane + 1))
        residuals.commit(step)
    return residuals


# --- steps


def test_what_is_not_sent_is_added_to_the_next_gradient() -> None:
    """The plan has the last parameter first: one of its four elements goes, and one of the six of the other."""
    kept = after_steps(Residuals(PLAN, LANES), [1])
    assert held(kept) == [1, 2, 3, 0, 5, 6, 7, 8, 9, 0]
    after_steps(kept, [2])
    assert held(kept) == [2, 4, 0, 4, 10, 12, 14, 16, 0, 10]


def test_a_step_that_is_redone_finds_what_it_found_before() -> None:
    once, twice = (after_steps(Residuals(PLAN, LANES), [1, 2]) for _ in range(2))
    first = twice.encode([compressor()], 3, 0, BOTH, gradient(2))[0].payload
    assert held(twice) == held(once), "what is not applied does not count"
    again = twice.encode([compressor()], 3, 0, BOTH, gradient(2))[0].payload
    assert again == first
    twice.commit(3)
    assert held(twice) == held(after_steps_with(once, 3, 2))


def after_steps_with(residuals: Residuals, step: int, scale: float) -> Residuals:
    residuals.encode([compressor()], step, 0, BOTH, gradient(scale))
    residuals.commit(step)
    return residuals


def test_void_steps_leave_what_was_held_back_before_them() -> None:
    kept = after_steps(Residuals(PLAN, LANES), [1, 2])
    before = held(kept)
    for step in (3, 4, 5):
        kept.encode([compressor()], step, 0, BOTH, [torch.full((10,), torch.nan)])
        assert held(kept) == before
    after_steps(kept, [6])
    assert held(kept) == held(after_steps(Residuals(PLAN, LANES), [1, 2, 6]))


def test_a_parameter_without_a_gradient_keeps_what_it_has() -> None:
    kept = after_steps(Residuals(PLAN, LANES), [1])
    before = kept.state().tensors
    first = {name: tensor[:4].tolist() for name, tensor in before.items()}
    nothing = gradient()
    nothing[0][:4] = 0
    kept.encode([compressor()], 2, 0, 0b01, nothing)
    kept.commit(2)
    assert {name: tensor[:4].tolist() for name, tensor in kept.state().tensors.items()} == first


# --- memory that outlives its worker


@pytest.mark.parametrize("moment", ["before it is sealed", "after it is sealed"])
def test_a_writer_that_dies_takes_nothing_along(moment: str) -> None:
    descriptor = shared()
    after_steps(Residuals(PLAN, LANES, descriptor=descriptor), [1, 2])
    expected = held(after_steps(Residuals(PLAN, LANES), [1, 2]))
    pid = os.fork()
    if pid == 0:
        memory = LaneMemory(PLAN, LANES, descriptor)
        memory.begin(0, 2)[0].fill_(9.0)
        if moment == "after it is sealed":
            memory.seal(0, 3)
        os._exit(0)
    os.waitpid(pid, 0)
    memory = LaneMemory(PLAN, LANES, descriptor)
    assert memory.at(0, 2)[0].tolist() == expected
    assert memory.holds(0, 3) == (moment == "after it is sealed")
    if memory.holds(0, 3):
        # Others may have completed step 3 by what the dead had sent of it.
        assert memory.at(0, 3)[0].tolist() == [9.0] * 10
    assert not memory.holds(0, 1)
    assert not memory.holds(1, 2)


# --- generations


class Hosts:
    """Workers with a lane each, some of them on one host, that hold the state after step 2."""

    def __init__(self, hosts: str) -> None:
        memories = {host: shared() for host in sorted(set(hosts))}
        self.of = [Residuals(PLAN, LANES, descriptor=memories[host]) for host in hosts]
        for worker, residuals in enumerate(self.of):
            residuals._hosted = range(worker, worker + 1)
            after_steps(residuals, [1, 2], [worker])
        self.memories = memories

    def settle(self, members: dict[int, range]) -> list[Any]:
        """Form a generation of these workers, with these lanes; what each ends with."""
        cursor = Cursor(2)
        generation = Generation(
            GenerationId(1, 2), tuple(Member(worker, "", lanes, cursor=cursor) for worker, lanes in members.items())
        )
        rings = [
            ring_of(generation, worker, *links, within(100))
            for worker, links in zip(members, memory_links(len(members)), strict=True)
        ]

        def work(position: int) -> Any:
            try:
                self.of[list(members)[position]].settle(generation, position, rings[position], QUIET)
            except ResidualsLost as error:
                return error
            return None

        with ThreadPoolExecutor(len(members)) as threads:
            ended = list(threads.map(work, range(len(members))))
        for ring in rings:
            ring.close()
        return ended

    def assert_right(self, worker: int, lanes: range) -> None:
        tensors = self.of[worker].state().tensors
        assert sorted(tensors) == [f"lanes.{lane}.0.0" for lane in lanes]
        for lane in lanes:
            alone = after_steps(Residuals(PLAN, LANES), [1, 2], [lane])
            assert torch.equal(tensors[f"lanes.{lane}.0.0"], alone.state().tensors[f"lanes.{lane}.0.0"])


def test_a_neighbour_on_the_host_takes_over_the_lanes_of_the_dead() -> None:
    workers = Hosts("AABB")
    lanes = {1: range(2), 2: range(2, 3), 3: range(3, 4)}
    assert workers.settle(lanes) == [None] * 3
    for worker, hosted in lanes.items():
        workers.assert_right(worker, hosted)


@pytest.mark.parametrize("piece", [16, 2**20])
def test_lanes_go_from_host_to_host_with_what_they_hold_back(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    workers = Hosts("ABCC")
    lanes = {3: range(1), 0: range(1, 2), 1: range(2, 4)}
    assert workers.settle(lanes) == [None] * 3
    for worker, hosted in lanes.items():
        workers.assert_right(worker, hosted)


def test_a_replacement_finds_its_lane_in_the_memory_of_its_host() -> None:
    workers = Hosts("AABB")
    fresh = Residuals(PLAN, LANES, descriptor=workers.memories["B"])
    fresh.load({"dict": {"applied": 2, "lanes": [[]] * LANES}}, {})  # as with a state that was copied
    workers.of[3] = fresh
    lanes = {worker: range(worker, worker + 1) for worker in range(4)}
    assert workers.settle(lanes) == [None] * 4
    workers.assert_right(3, range(3, 4))


def test_a_lost_host_is_told_by_everybody_with_the_lanes() -> None:
    workers = Hosts("AABB")
    ended = workers.settle({0: range(2), 1: range(2, 4)})
    assert [type(error) for error in ended] == [ResidualsLost] * 2
    assert "What lanes 2, 3 had held back of the gradients at step 2" in str(ended[0])


def test_a_restored_state_comes_before_what_is_in_memory() -> None:
    """Which may be of workers that were given up, since their replicas differed."""
    workers = Hosts("A")
    saved = {f"lanes.{lane}.0.0": torch.full((10,), float(lane)) for lane in range(LANES)}
    fresh = Residuals(PLAN, LANES, descriptor=workers.memories["A"])
    fresh.load({"dict": {"applied": 2, "lanes": [[]] * LANES}}, saved)
    workers.of[0] = fresh
    assert workers.settle({0: range(4)}) == [None]
    assert {name: tensor.tolist() for name, tensor in fresh.state().tensors.items()} == {
        name: tensor.tolist() for name, tensor in saved.items()
    }


def test_what_was_restored_outlives_a_generation_that_ends_before_it_is_settled() -> None:
    """The memory of no host has it yet: who is lost meanwhile must not take it along."""
    workers = Hosts("A")
    saved = {f"lanes.{lane}.0.0": torch.full((10,), float(lane)) for lane in range(LANES)}
    fresh = Residuals(PLAN, LANES)
    fresh.load({"dict": {"applied": 2, "lanes": [[]] * LANES}}, saved)
    workers.of[0] = fresh
    generation = Generation(GenerationId(1, 1), (Member(0, "host:0", range(2)), Member(1, "host:1", range(2, 4))))
    links, _ = memory_links(2)
    ring = ring_of(generation, 0, *links, within(100))
    ring.close()
    with pytest.raises(LinkError):
        fresh.settle(generation, 0, ring, QUIET)
    assert workers.settle({0: range(4)}) == [None]
    assert fresh.state().tensors.keys() == saved.keys()


def test_a_checkpoint_of_another_number_of_lanes_begins_with_nothing_held_back() -> None:
    fresh = Residuals(PLAN, LANES)
    fresh.load({"dict": {"applied": 2, "lanes": [[]] * 2}}, {})
    assert fresh.applied == 0
    fresh.load(None, {})
    assert fresh.applied == 0
