"""The members of a generation in which units are applied one by one: what each comes to hold, and trains with.

A block is what the units in it have made of it, wherever its server stands. So the holder with most of them gives it to
the others: replicas follow their primary, and whoever has more has all that the others have. What nobody was told to be
done may be in some blocks and not in others; it is dealt again, and applied where it is missing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.core.generation import Role
from quorate.reduce.connect import connect
from quorate.reduce.endpoint import Endpoint
from quorate.reduce.neighbours import watch
from quorate.spec.job import JobSpec
from quorate.strategies.servers.align import Aligner, Transfer
from quorate.strategies.servers.dealing import AppliedSet, applied_everywhere
from quorate.strategies.servers.links import LinkedReduction, connect_star
from quorate.strategies.servers.member import MemberConnection
from quorate.strategies.servers.option import ServersSpec
from quorate.strategies.servers.placement import Holders
from quorate.strategies.servers.share import Share
from quorate.strategies.servers.units.channel import UnitChannel, UnitPlan
from quorate.strategies.servers.units.loop import Standing, UnitLoop, UnitStrategy
from quorate.strategies.state_copy import Passing
from quorate.training.activity import Activity
from quorate.training.device import digests
from quorate.training.divergence import COMPARE_INDEX, Voucher, compare_replicas
from quorate.training.gradients import LoneGradients, gradient_plan
from quorate.training.progress import Progress
from quorate.training.update import Update

SETS_INDEX = 10
"""Tells the applied sets from what else is gathered before the first step."""


def connect_units(spec: JobSpec, share: Share, endpoint: Endpoint, placement: Sequence[Holders]) -> "UnitConnection":
    """Waits for the other members: all of them are joined for gathers, and each worker is linked to each server."""
    reduction, _ = connect(endpoint, ())
    try:
        links = connect_star(endpoint, reduction)
    except BaseException:
        reduction.close()
        raise
    generation, trainable = endpoint.generation, share.replica.trainable
    deadline, _ = watch(endpoint, list(links.values()))
    staying = [at for at, member in enumerate(generation.members) if member.role is Role.SERVER]
    workers = [at for at, member in enumerate(generation.members) if member.role is Role.WORKER]
    peers = staying if endpoint.position in workers else workers if endpoint.position in staying else []
    channels = {peer: UnitChannel(links[peer], generation.id, deadline) for peer in peers}
    holders = [[generation.position(server) for server in places] for places in placement]
    plan = UnitPlan(gradient_plan(trainable, spec.bucket_mb), holders, staying)
    joined, gradients = LinkedReduction(reduction, links), LoneGradients(trainable)
    assert isinstance(spec.strategy, ServersSpec)
    return UnitConnection(endpoint, joined, gradients, share, placement, plan, channels, spec.strategy)


@dataclass
class UnitConnection(MemberConnection):
    """One member's connection to the others of its generation."""

    loop = UnitLoop
    plan: UnitPlan
    channels: Mapping[int, UnitChannel]
    spec: ServersSpec
    standing: Standing = field(init=False)

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        aligner = UnitAligner(self.generation, self.own.worker, self.links, self.share, activity, hold)
        progress, copied, self.standing = aligner.align(progress, self.placement)
        self.log_placement()
        return progress, copied

    def strategy(self, update: Update, activity: Activity) -> UnitStrategy:  # noqa: ARG002
        return UnitStrategy(self, self.plan, self.channels, self.spec, self.standing, activity)


@dataclass
class UnitAligner(Aligner):
    """Aligns one member."""

    def align(self, progress: Progress, placement: Sequence[Holders]) -> tuple[Progress, int, Standing]:
        """The progress that it has then, the bytes that were copied, and where all servers stand."""
        record = self.share.units
        versions: Mapping[int, int] = {} if record is None else record.versions(self.generation.cursor.step)
        progress, copied = self.run(progress, placement, versions=versions)
        told = self._sets()
        # What is only in the base of another was never told to be done, and is dealt again.
        bases = {position: AppliedSet.from_json(base) for position, (_, base) in told.items()}
        donor = max(bases, key=lambda position: (len(bases[position]), -position))
        if receivers := tuple(position for position, base in bases.items() if base != bases[donor]):
            copied += self._copy_base(donor, receivers)
        # By what they have told, all have taken up their blocks.
        self.share.drop_surplus()
        sets = [AppliedSet.from_json(each) for blocks, _ in told.values() for each in blocks] + [bases[donor]]
        is_boundary = all(each == AppliedSet(each.lanes, progress.cursor.step) for each in sets)
        return progress, copied, Standing(applied_everywhere(sets), max(each.furthest for each in sets), is_boundary)

    def _sets(self) -> dict[int, tuple[list[Any], Any]]:
        """The sets of each server's blocks and of its base, by position; those who leave only give."""
        record, mine = self.share.units, None
        if record is not None:
            # Equal ones once: mostly all are.
            blocks = {json.dumps(record.blocks[block].to_json()) for block in self.share.placed}
            mine = [[json.loads(each) for each in sorted(blocks)], record.base.to_json()]
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
        applied = [[block, self.share.units.blocks[block].to_json()] for block in transfer.blocks]
        return encode(self.share.blocks(transfer.blocks) | {"applied": applied})

    def _take(self, transfer: Transfer, tree: dict[str, Any], progress: Progress) -> Progress:
        progress = super()._take(transfer, tree, progress)
        if "applied" in tree and self.share.units is not None:
            self.share.units.blocks |= {block: AppliedSet.from_json(applied) for block, applied in tree["applied"]}
        return progress

    def _compare(self, step: int, *, is_sound: bool) -> None:  # noqa: ARG002
        """Holders of a block that have as many units in it must hold the same; of buffers each has its own."""
        share, applied = self.share, {} if self.share.units is None else self.share.units.blocks
        values = [(block, *share.replica.trainable[block]) for block in sorted(share.held & applied.keys())]
        held = {f"{name} with {len(applied[block])} units": value.detach() for block, name, value in values}
        voucher = Voucher(self.worker, digests(held.items(), share.replica.device), is_partial=True)
        compare_replicas(step, voucher, partial(self._gather, COMPARE_INDEX))
