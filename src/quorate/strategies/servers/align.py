"""How the members of a generation with servers come to hold what they are to hold, before its first step.

Each tells what it has. A server that was about to update when its generation ended does so now, if anybody has
completed that step. Then the base goes to whoever stands elsewhere, blocks go to the servers that are to hold them, and
values to the workers that lack them. Nothing is taken up before all have all: until then everybody could still go on
from what it had. Nobody lets go of a block before the first step is agreed on: then all have taken up theirs.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.collectives.reduction import Reduction
from quorate.core.errors import StateLost
from quorate.core.generation import OTHERS, Generation, Role
from quorate.replica.device import digests
from quorate.strategies.servers.placement import Holders
from quorate.strategies.servers.share import Share
from quorate.strategies.state_copy import Passing
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.divergence import COMPARE_INDEX, Voucher, compare_replicas

log = logging.getLogger(__name__)

HOLDINGS_INDEX = 5
ALIGNED_INDEX = 6
"""They tell apart what is gathered before the first step."""


@dataclass(frozen=True)
class Transfer:
    """Blocks, or the base where there are none, that go from one member to others, by ring positions."""

    donor: int
    receivers: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    values_only: bool = False


def plan_transfers(
    generation: Generation, holdings: Sequence[Mapping[int, int]], placement: Sequence[Holders]
) -> list[Transfer]:
    """Who gives what to whom; `holdings` are by position, and `placement` names the servers that are to hold a block.

    Raises StateLost if nobody has a block.
    """
    positions = {member.worker: position for position, member in enumerate(generation.members)}
    behind = tuple(generation.position(worker) for worker in generation.behind)
    workers = tuple(position for position in behind if generation.members[position].role is Role.WORKER)
    servers = tuple(position for position in behind if position not in workers)
    transfers = [Transfer(_donor(generation, of), of) for of in (servers, workers) if of]
    to_servers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    to_workers: dict[int, list[int]] = {}
    if lost := len(set(range(len(placement))) - {block for held in holdings for block in held}):
        raise StateLost(
            f"{lost} of {len(placement)} parameters were on no other server than those that are lost"
            " (`strategy.replicas` says how many servers hold each)."
        )
    for block, holders in enumerate(placement):
        newest = max(held[block] for held in holdings if block in held)
        has = [position for position, held in enumerate(holdings) if held.get(block) == newest]
        lacking = tuple(positions[server] for server in holders if positions[server] not in has)
        if lacking:
            to_servers.setdefault((has[0], lacking), []).append(block)
        to_workers.setdefault(has[0], []).append(block)
    transfers += [Transfer(*ends, tuple(blocks)) for ends, blocks in to_servers.items()]
    if workers:
        transfers += [Transfer(donor, workers, tuple(blocks), True) for donor, blocks in to_workers.items()]
    return transfers


def _donor(generation: Generation, receivers: Sequence[int]) -> int:
    """Who gives them the base: one of their role, if there is one, since what step() changes of an optimizer's settings
    is changed on servers only."""
    role = Role.of(generation.members[receivers[0]].worker)
    others = (one.worker for one in generation.members if one.worker not in generation.behind)
    return next((generation.position(one) for one in others if Role.of(one) is role), generation.donor)


@dataclass
class Aligner:
    """Aligns one member. `hold` is told the progress as soon as this member has come to it."""

    generation: Generation
    worker: int
    reduction: Reduction
    share: Share
    activity: Activity
    hold: Callable[[Progress], None]

    def run(
        self,
        progress: Progress,
        placement: Sequence[Holders],
        versions: Mapping[int, int] | None = None,
    ) -> tuple[Progress, int]:
        """The progress that this member has then, and the bytes that were copied.

        `versions` are those of its blocks (the highest counts), wherever it stands itself; without them, blocks are of
        where it stands.
        """
        generation, share, pending = self.generation, self.share, self.share.pending
        step, position = generation.cursor.step, generation.position(self.worker)
        may_complete = pending is not None and pending.step == step == progress.cursor.step + 1
        # An evaluation changes no block: who has not done it yet holds what the others hold.
        stands_there = progress.cursor.step == step
        own = versions if versions is not None else dict.fromkeys(share.held, 0)
        is_told = stands_there or may_complete or versions is not None
        told = json.dumps([sorted(own.items()) if is_told else [], share.norms if stands_there else None])
        everyone = [json.loads(payload) for payload in self._gather(HOLDINGS_INDEX, told.encode())]
        if pending is not None and may_complete:
            known = next(norms for _, norms in everyone if norms is not None)
            log.info("completes step %d, which others have completed", step)
            progress = pending.complete(known, progress)
            self.hold(progress)
        transfers = plan_transfers(generation, [dict(versions) for versions, _ in everyone], placement)
        copied, received = 0, []
        if transfers:
            self._compare(step, is_sound=progress.cursor == generation.cursor and not may_complete)
        passing = Passing(generation, position, self.reduction, self.activity)
        for transfer in transfers:
            given = self._given(transfer, progress) if position == transfer.donor else None
            encoded, size = passing.copy(transfer.donor, transfer.receivers, given)
            copied += size
            if encoded is not None:
                received.append((transfer, encoded))
        self._gather(ALIGNED_INDEX, b"")
        if not is_told:
            # Of another step, which this one is about to leave: after that they would be taken for those of this one.
            share.drop(set(share.held))
        for transfer, encoded in received:
            progress = self._take(transfer, decode(encoded.skeleton, encoded.tensors), progress)
        self.hold(progress)
        share.pending = None  # not earlier: this may be tried again, in another generation
        return progress, copied

    def _take(self, transfer: Transfer, tree: dict[str, Any], progress: Progress) -> Progress:
        if not transfer.blocks:
            return self.share.load_base(tree)
        self.share.load_blocks(tree, transfer.blocks)
        return progress

    def _given(self, transfer: Transfer, progress: Progress) -> Encoded:
        if not transfer.blocks:
            return encode(self.share.base(progress))
        return encode(self.share.blocks(transfer.blocks, values_only=transfer.values_only))

    def _compare(self, step: int, *, is_sound: bool) -> None:
        """Nobody copies anything before all who hold it have found that they hold the same."""
        voucher = None
        if is_sound:
            held = digests(self.share.compared().items(), self.share.replica.device)
            settings = self.share.replica.optimizers.settings.values()
            voucher = Voucher(self.worker, held, is_partial=True, settings=settings)
        compare_replicas(step, voucher, partial(self._gather, COMPARE_INDEX))

    def _gather(self, index: int, payload: bytes) -> tuple[bytes, ...]:
        with self.activity.waiting(OTHERS):
            return self.reduction.gather(self.generation.cursor.step, index, payload)
