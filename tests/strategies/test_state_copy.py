"""A state on its way from its donor to those that are behind, over in-memory links."""

import tracemalloc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gang
from bits.bit_tasks import Adam, Regression
from collectives.rings import memory_links, ring_of
from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.collectives.ring import Ring
from quorate.core.errors import ReplicasDiffer, WorkerUnfit
from quorate.core.generation import Cursor, Generation, GenerationId, Member
from quorate.core.machine import fresh_memory
from quorate.replica.device import CPU, Device
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Gather, HeldState, Parts, Replicated, StateLayout
from quorate.strategies import state_copy
from quorate.strategies.state_copy import align
from quorate.task.progress import Progress
from quorate.task.task import Task, configure
from quorate.training.activity import Activity
from replica.counting_device import CountingDevice
from wire.pairs import within

AHEAD = Progress().after_step(8)


class Large(Regression):
    def model(self) -> nn.Module:
        return nn.Linear(1000, 1000)


def replica_of(task: type[Task] = Adam, *, is_trained: bool, device: Device = CPU) -> Replica:
    spec = gang.job(task)
    replica = Replica(configure(task, spec.params, "test", spec.seed), spec, device)
    if is_trained:
        for index, (_, parameter) in enumerate(replica.parameters):
            parameter.grad = torch.full_like(parameter, float(index + 1))
        replica.optimizers.update()
    return replica


class Members:
    """A generation in which some are behind, on a ring of threads."""

    def __init__(self, count: int, behind: set[int], task: type[Task] = Adam, parts: int | None = None) -> None:
        cursors = [Cursor() if position in behind else AHEAD.cursor for position in range(count)]
        members = (
            Member(10 + p, "", range(p, p + 1), cursor=cursor, part=None if parts is None else p % parts)
            for p, cursor in enumerate(cursors)
        )
        self.generation = Generation(GenerationId(1, 1), tuple(members), restored=AHEAD.cursor if parts else None)
        self.behind = behind
        self.replicas = [replica_of(task, is_trained=position not in behind) for position in range(count)]
        self.peaks = [0] * count
        self.layouts: list[StateLayout] | None = None

    def align(self) -> list[Any]:
        """What each gives, or the error that it ends with."""
        rings = [
            ring_of(self.generation, member.worker, *links, within(100))
            for member, links in zip(self.generation.members, memory_links(len(self.replicas)), strict=True)
        ]

        def work(position: int) -> Any:
            progress = Progress() if position in self.behind else AHEAD
            layout = Replicated(self.replicas[position]) if self.layouts is None else self.layouts[position]
            activity = Activity(lambda *_: None)
            try:
                return align(self.generation, 10 + position, rings[position], layout, progress, activity)
            except Exception as error:
                rings[position].close()
                return error

        with ThreadPoolExecutor(len(rings)) as threads:
            found = list(threads.map(work, range(len(rings))))
        for ring in rings:
            ring.close()
        return found


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(2, 5), st.sampled_from([7, 64, 1000, state_copy.PIECE]))
def test_whoever_is_behind_has_the_bits_of_the_others_afterwards(data: st.DataObject, count: int, piece: int) -> None:
    behind = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    members = Members(count, behind)
    expected = replica_of(is_trained=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_copy, "PIECE", piece)
        found = members.align()
    assert [progress for progress, _ in found] == [AHEAD] * count
    (size,) = {size for _, size in found}
    assert (size > 0) is bool(behind)
    assert {replica.weights_digest() for replica in members.replicas} == {expected.weights_digest()}
    states = {str(replica.optimizers.state()) for replica in members.replicas}
    assert states == {str(expected.optimizers.state())}


def test_nobody_copies_from_those_whose_settings_differ() -> None:
    members = Members(4, {3})
    next(iter(members.replicas[1].optimizers.by_name.values())).param_groups[0]["betas"] = (0.8, 0.999)
    for error in members.align():
        assert isinstance(error, ReplicasDiffer)
        assert error.culprits == (11,)
        assert "have [0.8, 0.999] and [0.9, 0.999] in optimizer.param_groups[0]['betas']" in error.message


def test_who_needs_nothing_of_it_needs_no_more_memory_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the donor: the state is sent from where it lies."""
    monkeypatch.setattr(state_copy, "PIECE", 2**16)
    members = Members(3, {2}, Large)  # worker 1 passes it on
    taken = []
    monkeypatch.setattr(state_copy, "fresh_memory", lambda size: taken.append(size) or fresh_memory(size))  # type: ignore[func-returns-value]
    tracemalloc.start()
    try:
        (_, size), _, _ = members.align()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken == [size], "the receiver, once"
    assert size > 4_000_000
    assert peak < 2_000_000, "of all three together, besides the memory of the receiver"


def test_a_piece_that_is_changed_on_its_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members(3, {1})
    real = Ring._receive_into

    def damage(ring: Ring, tag: Any, content: memoryview) -> None:
        real(ring, tag, content)
        if ring._position == 1 and tag.index == 1:
            content[len(content) // 2] ^= 1

    monkeypatch.setattr(Ring, "_receive_into", damage)
    before = members.replicas[1].weights_digest()
    found = members.align()
    assert isinstance(found[1], WorkerUnfit)
    assert "is not the one that was sent" in str(found[1])
    assert members.replicas[1].weights_digest() == before, "it has still the state that it had"


def test_what_is_held_is_digested_through_its_device() -> None:
    members, device = Members(3, {2}), CountingDevice()
    members.replicas[0] = replica_of(is_trained=True, device=device)
    members.align()
    assert device.counts["content"] == len(members.replicas[0].state_tensors())


def test_nobody_copies_from_holders_that_differ() -> None:
    members = Members(3, {2})
    with torch.no_grad():
        members.replicas[1].parameters[0][1].view(-1)[0] += 1
    assert all(isinstance(error, ReplicasDiffer) for error in members.align())


@dataclass(frozen=True)
class Part:
    """One part of a state, which is a number; before it was trained, zero."""

    name: str
    held: torch.Tensor
    boxes = None

    def state(self, progress: Progress) -> HeldState:
        tensors = {self.name: self.held}
        return HeldState(encode({"progress": progress.to_dict()} | tensors), tensors, frozenset(), is_whole=False)

    def parts(self, held: HeldState, writers: int) -> Parts:
        raise AssertionError("nobody saves here")

    def load(self, encoded: Encoded) -> Progress:
        self.held.copy_(encoded.tensors[self.name])
        return Progress.from_dict(decode(encoded.skeleton, encoded.tensors)["progress"])

    def donors(self, generation: Generation) -> Mapping[int, int]:
        behind = [generation.position(worker) for worker in generation.behind]
        holders = {position: generation.holders(generation.members[position].part) for position in behind}
        return {position: of[0] for position, of in holders.items() if of}

    def weights_digest(self, gather: Gather) -> str:
        raise AssertionError("nobody is done here")


def test_a_part_is_copied_from_who_holds_the_same_and_one_that_is_lost_is_not_compared() -> None:
    # The second part is lost: those who held it are at other steps, and take up a checkpoint afterwards.
    members = Members(4, behind := {1, 2, 3}, parts=2)
    parts = [Part(f"part {p % 2}", torch.full((3,), 0.0 if p in behind else p + 1.0)) for p in range(4)]
    parts[3].held.fill_(-1)
    members.layouts = list(parts)
    found = members.align()
    assert [progress for progress, _ in found] == [AHEAD, Progress(), AHEAD, Progress()]
    assert [float(part.held[0]) for part in parts] == [1, 0, 1, -1]
