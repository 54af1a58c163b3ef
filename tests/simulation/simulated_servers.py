"""Parameter servers of a simulation: who holds which block, in which version, and what they owe each other.

Where a job has servers its state is spread over them. A block is known by how many steps were applied to it. Who is to
hold it is the real placement; who gives it to whom is planned here, as strategies/servers/align.py does it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quorate.core.errors import StateLost
from quorate.core.generation import Generation, Role
from simulation.task import Contribution, Holding

BLOCKS = tuple(f"block {number}" for number in range(7))

Holders = tuple[int, ...]
Held = Mapping[int, int]
"""Blocks, and how many steps were applied to each."""


@dataclass(frozen=True)
class Pending:
    """A step that a server could complete when its generation ended: all others could, too."""

    step: int
    parts: tuple[Contribution, ...]


def everything(holding: Holding) -> dict[int, int]:
    """All blocks, as who begins from a checkpoint or from nothing has them."""
    return dict.fromkeys(range(len(BLOCKS)), holding.cursor.step)


def placement_of(generation: Generation, replicas: int) -> tuple[Holders, ...]:
    """Who is to hold each block: servers that stay."""
    from quorate.strategies.servers.placement import (
        place,  # an option, which a simulation without servers does not need
    )

    staying = [server.worker for server in generation.servers if server.role is Role.SERVER]
    return place(BLOCKS, staying, replicas)


def placed_at(placement: Sequence[Holders], server: int) -> frozenset[int]:
    """The blocks that a server is to hold."""
    return frozenset(block for block, holders in enumerate(placement) if server in holders)


def check_held(told: Iterable[Held], step: int) -> None:
    """Raise StateLost unless every block of a step is with somebody."""
    held = {block for blocks in told for block, version in blocks.items() if version == step}
    lost = len(BLOCKS) - len(held)
    if lost:
        raise StateLost(f"{lost} of {len(BLOCKS)} blocks are held by nobody.")
