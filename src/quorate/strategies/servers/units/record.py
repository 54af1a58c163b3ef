"""Which units of work are in what a server holds, in the modes that apply units one by one."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from quorate.strategies.servers.units.applied import AppliedSet, Unit


@dataclass
class UnitRecord:
    """Since the last boundary; it outlives generations, as the state does.

    `blocks` has the applied set of each block that this server holds. `base` is that of all else: the buffers, and the
    notes of the units, of which each server has all. So whoever is left of several servers can go on as the hub.
    """

    lanes: int
    base: AppliedSet = field(init=False)
    blocks: dict[int, AppliedSet] = field(default_factory=dict)
    notes: dict[Unit, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = AppliedSet(self.lanes)

    def reset(self, step: int, blocks: Iterable[int]) -> None:
        """The state is that of a boundary: all units up to a step are in it, and nothing else is."""
        self.base = AppliedSet(self.lanes, step)
        self.blocks = {block: AppliedSet(self.lanes, step) for block in blocks}
        self.notes = {}

    def sets(self) -> list[AppliedSet]:
        return [self.base, *self.blocks.values()]

    def versions(self, step: int) -> dict[int, int]:
        """How many units are in each block; a block that lacks some of the steps up to this one is of no use."""
        return {block: len(applied) for block, applied in self.blocks.items() if applied.through >= step}

    def keep_only(self, blocks: Collection[int]) -> None:
        self.blocks = {block: applied for block, applied in self.blocks.items() if block in blocks}

    def of_blocks(self, blocks: Iterable[int]) -> list[Any]:
        """The sets of some blocks, for whoever takes these over."""
        return [[block, self.blocks[block].to_json()] for block in blocks]

    def take_blocks(self, told: Iterable[Any]) -> None:
        """Go on from what another server has told of blocks."""
        self.blocks |= {block: AppliedSet.from_json(applied) for block, applied in told}

    def of_base(self) -> dict[str, Any]:
        """The rest, for a server that lacks some of it."""
        notes = [[list(unit), note] for unit, note in sorted(self.notes.items())]
        return {"applied": self.base.to_json(), "notes": notes}

    def take_base(self, told: dict[str, Any]) -> None:
        self.base = AppliedSet.from_json(told["applied"])
        self.notes = {Unit(*unit): note for unit, note in told["notes"]}
