"""Workers and parameter servers in threads, each pair linked."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from collectives.reference import wide_values
from memory_link import memory_link_pair
from quorate.collectives.memory import dtype_of
from quorate.collectives.reduction import sum_lanes
from quorate.core.generation import Generation, GenerationId, Member, Role
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.lanes.chunks import host_lanes
from quorate.strategies.servers.exchange import Star
from quorate.strategies.servers.links import Spokes
from quorate.wire.link import Link
from wire.pairs import within

T = TypeVar("T")

Tensors = Sequence[tuple[int, torch.dtype]]
"""Sizes and types."""

F32_TENSORS = [(5, torch.float32), (100_000, torch.float32), (3, torch.float32), (70_000, torch.float32)]


def star_generation(lanes: int, workers: int, servers: int) -> Generation:
    members = [Member(10 + i, f"host:{i}", hosted) for i, hosted in enumerate(host_lanes(lanes, workers))]
    members += [Member(20 + i, f"host:{workers + i}", range(0), role=Role.SERVER) for i in range(servers)]
    return Generation(GenerationId(1, 1), tuple(members))


def hold(blocks: int, workers: int, servers: int, replicas: int) -> list[tuple[int, ...]]:
    """Positions of the servers of each block, the primary first."""
    return [tuple(workers + (block + i) % servers for i in range(min(replicas, servers))) for block in range(blocks)]


@dataclass
class Case:
    """What is exchanged, and between whom."""

    generation: Generation
    plan: tuple[Bucket, ...]
    holders: list[tuple[int, ...]]
    values: dict[int, tuple[torch.Tensor, ...]]

    @property
    def workers(self) -> range:
        return range(len(self.generation.workers))

    @property
    def servers(self) -> range:
        return range(len(self.generation.workers), len(self.generation.members))

    def sums(self) -> dict[int, torch.Tensor]:
        """Of each block, straight from the sums of whole buckets."""
        sums = {}
        for number, bucket in enumerate(self.plan):
            total = torch.empty(bucket.numel, dtype=dtype_of(bucket))
            sum_lanes([self.values[lane][number] for lane in sorted(self.values)], total)
            for slot in bucket.slots:
                sums[slot.index] = total[slot.offset : slot.offset + slot.numel]
        return sums

    def empty(self, blocks: Sequence[int]) -> dict[int, torch.Tensor]:
        slots = {slot.index: (slot.numel, dtype_of(bucket)) for bucket in self.plan for slot in bucket.slots}
        return {block: torch.full((slots[block][0],), 7, dtype=slots[block][1]) for block in blocks}

    def held(self, server: int) -> list[int]:
        return [block for block, places in enumerate(self.holders) if server in places]

    def led(self, server: int) -> list[int]:
        return [block for block, places in enumerate(self.holders) if places[0] == server]


def case(tensors: Tensors, lanes: int, workers: int, servers: int, replicas: int, bucket_mb: float = 1) -> Case:
    shapes = [TensorShape(f"t{i}", str(dtype), dtype.itemsize, size) for i, (size, dtype) in enumerate(tensors)]
    plan = plan_buckets(shapes, bucket_mb)
    values: dict[int, tuple[torch.Tensor, ...]] = dict.fromkeys(range(lanes), ())
    for number, bucket in enumerate(plan):
        for lane, value in enumerate(wide_values(lanes, bucket.numel, number)):
            values[lane] += (value.to(dtype_of(bucket)),)
    return Case(star_generation(lanes, workers, servers), plan, hold(len(tensors), workers, servers, replicas), values)


@contextmanager
def stars(given: Case, seconds: float = 10) -> Iterator[list[Star]]:
    """One at each position, over links that hold nothing."""
    links: list[dict[int, Link]] = [{} for _ in given.generation.members]
    for worker in given.workers:
        for server in given.servers:
            names = [f"worker {given.generation.members[at].worker}" for at in (worker, server)]
            links[worker][server], links[server][worker] = memory_link_pair((names[0], names[1]))
    made = []
    for position, member in enumerate(given.generation.members):
        own = {lane: given.values[lane] for lane in member.lanes}
        spokes = Spokes(given.generation, member.worker, links[position], within(seconds))
        made.append(Star(spokes, given.plan, given.holders, own))
    try:
        yield made
    finally:
        for star in made:
            star.spokes.close()


def at_all(given: list[Star], work: Callable[[int, Star], T]) -> list[T]:
    """What each member's thread gives, in order of positions."""
    with ThreadPoolExecutor(len(given)) as threads:
        return [future.result() for future in [threads.submit(work, i, star) for i, star in enumerate(given)]]
