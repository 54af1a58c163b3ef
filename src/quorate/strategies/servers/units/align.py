"""How members come to hold what they are to hold, where units are applied one by one.

A block is what the units in it have made of it, wherever its server stands. So the holder with most of them gives it to
the others: replicas follow their primary, and whoever has more has all that the others have. What nobody was told to be
done may be in some blocks and not in others; it is dealt again, and applied where it is missing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.core.generation import Role
from quorate.strategies.servers.align import Aligner, Transfer
from quorate.strategies.servers.units.applied import AppliedSet, applied_everywhere
from quorate.strategies.servers.units.record import UnitRecord
from quorate.strategies.state_copy import Passing
from quorate.training.device import digests
from quorate.training.divergence import COMPARE_INDEX, Voucher, compare_replicas
from quorate.training.progress import Progress

SETS_INDEX = 10
"""Tells the applied sets from what else is gathered before the first step."""


@dataclass(frozen=True)
class Standing:
    """What all servers have after they were aligned: the units that are applied on every block; the latest step of
    which any block has one; and whether there is nothing else, so that the state is that of a boundary."""

    everywhere: AppliedSet
    furthest: int
    is_boundary: bool


@dataclass
class UnitAligner(Aligner):
    """Aligns one member."""

    def align(self, progress: Progress, placement: Any) -> tuple[Progress, int, Standing]:
        """The progress that it has then, the bytes that were copied, and where all servers stand."""
        record = self.share.units
        versions: Mapping[int, int] = {} if record is None else record.versions(self.generation.cursor.step)
        progress, copied = self.run(progress, placement, None, None, versions)
        told = self._sets()
        donor, receivers = _most_advanced(told)
        if receivers:
            copied += self._copy_base(donor, receivers)
        # By what they have told, all have taken up their blocks.
        self.share.drop_surplus()
        sets = [AppliedSet.from_json(each) for blocks, _ in told.values() for each in blocks]
        sets.append(AppliedSet.from_json(told[donor][1]))
        everywhere, furthest = applied_everywhere(sets), max(each.furthest for each in sets)
        is_boundary = all(each == AppliedSet(each.lanes, progress.cursor.step) for each in sets)
        return progress, copied, Standing(everywhere, furthest, is_boundary)

    def _sets(self) -> dict[int, tuple[list[Any], Any]]:
        """The sets of each server's blocks and of its base, by position; those who leave only give."""
        share, own = self.share, self.generation.members[self.generation.position(self.worker)]
        mine = None
        if share.units is not None and own.role is not Role.WORKER:
            # Equal ones once: mostly all are.
            blocks = {json.dumps(share.units.blocks[block].to_json()) for block in share.placed}
            mine = [[json.loads(each) for each in sorted(blocks)], share.units.base.to_json()]
        everyone = [json.loads(told) for told in self._gather(SETS_INDEX, json.dumps(mine).encode())]
        return {position: (told[0], told[1]) for position, told in enumerate(everyone) if told is not None}

    def _copy_base(self, donor: int, receivers: tuple[int, ...]) -> int:
        """Buffers and notes, to servers that lack some of them."""
        position, record = self.generation.position(self.worker), self.share.units
        passing = Passing(self.generation, position, self.reduction, self.activity)
        given = None
        if position == donor and record is not None:
            buffers = dict(self.share.replica.buffers.committed())
            given = encode({"buffers": buffers, "units": record.of_base()})
        encoded, size = passing.copy(donor, receivers, given)
        if encoded is not None and record is not None:
            tree = decode(encoded.skeleton, encoded.tensors)
            self.share.replica.buffers.commit(tree["buffers"])
            record.take_base(tree["units"])
        return size

    def _given(self, transfer: Transfer, progress: Progress) -> Encoded:
        if not transfer.blocks or transfer.values_only:
            return super()._given(transfer, progress)
        assert self.share.units is not None, "only servers give blocks"
        tree = self.share.blocks(transfer.blocks)
        return encode(tree | {"applied": self.share.units.of_blocks(transfer.blocks)})

    def _take(self, transfer: Transfer, tree: dict[str, Any], progress: Progress) -> Progress:
        progress = super()._take(transfer, tree, progress)
        if "applied" in tree and self.share.units is not None:
            self.share.units.take_blocks(tree["applied"])
        return progress

    def _compare(self, step: int, *, is_sound: bool) -> None:  # noqa: ARG002
        """Holders of a block that have as many units in it must hold the same; of buffers each has its own."""
        share, record = self.share, self.share.units
        held = {} if record is None else _compared(share.blocks(share.held), record, share.replica.trainable)
        voucher = Voucher(self.worker, digests(held.items(), share.replica.device), is_partial=True)
        compare_replicas(step, voucher, partial(self._gather, COMPARE_INDEX))


def _compared(tree: dict[str, Any], record: UnitRecord, trainable: Any) -> dict[str, Any]:
    """The values of blocks, by their names and how many units are in them."""
    tensors = tree["replica"]["tensors"]
    return {
        f"{name} with {len(record.blocks[block])} units": tensors[name]
        for block, (name, _) in enumerate(trainable)
        if block in record.blocks and name in tensors
    }


def _most_advanced(told: Mapping[int, tuple[list[Any], Any]]) -> tuple[int, tuple[int, ...]]:
    """Who has most units in its base, and who has others, by position.

    What is only in the base of one of these was never told to be done, and is dealt again.
    """
    bases = {position: AppliedSet.from_json(base) for position, (_, base) in told.items()}
    donor = max(bases, key=lambda position: (len(bases[position]), -position))
    return donor, tuple(position for position, base in bases.items() if base != bases[donor])
