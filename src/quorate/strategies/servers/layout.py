"""The state of a job whose parameters are on servers: each server writes the blocks that it is the primary of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.boxes import Boxes
from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.core.generation import Generation, Role
from quorate.strategies.compression.residuals import LANES
from quorate.strategies.servers.share import UPDATED, Share
from quorate.training.progress import Progress
from quorate.training.state_layout import Gather, HeldState, Parts


@dataclass(frozen=True)
class OnServers:
    """Servers write one part each; the first of them writes the base, too. Workers write what their lanes have held
    back, if a job has that, in parts behind those of the servers."""

    share: Share

    def state(self, progress: Progress) -> HeldState:
        share, replica = self.share, self.share.replica
        tree: dict[str, Any] = share.blocks(share.primary)
        if share.number == 0:
            tree = joined(share.base(progress), tree)
            del tree[UPDATED]  # whoever has the whole state sees it there
        replica.device.synchronize()
        encoded, of_lanes = encode(tree), frozenset[str]()
        if share.residuals is not None:
            # The first writer's word counts where several say the same: all say all of it.
            kept = share.residuals.state()
            skeleton = {"dict": encoded.skeleton["dict"] | {LANES: kept.skeleton}}
            encoded, of_lanes = Encoded(skeleton, encoded.tensors | kept.tensors), frozenset(kept.tensors)
        weights = frozenset(name for name, _ in replica.tensors())
        known = encoded, share.compared(), weights, replica.device
        settings = replica.optimizers.settings.values()
        return HeldState(*known, is_whole=False, of_lanes=of_lanes, settings=settings)

    def parts(self, held: HeldState, writers: int) -> Parts:
        """Of its own alone: what the others write is theirs to know."""
        share, own = self.share, tuple(held.encoded.tensors)
        has_lanes = share.residuals is not None and share.residuals.applied > 0
        count = writers if has_lanes else share.servers
        return tuple(own if number == share.writer else () for number in range(count))

    def load(self, encoded: Encoded) -> Progress:
        share, fields = self.share, dict(encoded.skeleton["dict"])
        kept = fields.pop(LANES, None)
        if share.residuals is not None:
            share.residuals.load(kept, encoded.tensors)
        return share.load(decode({"dict": fields}, encoded.tensors))

    @property
    def boxes(self) -> Boxes | None:
        return None

    def donors(self, generation: Generation) -> Mapping[int, int]:  # noqa: ARG002
        """Blocks have holders of their own: the strategy moves them."""
        return {}

    def weights_digest(self, gather: Gather) -> str:  # noqa: ARG002
        """What servers hold, workers have pulled."""
        return self.share.replica.weights_digest()


def writing_order(generation: Generation) -> list[int]:
    """The members, by position, in the order in which they write a checkpoint: servers first, whose state it is; those
    that leave behind those that stay."""
    roles = (Role.SERVER, Role.RETIRING, Role.WORKER)
    members = enumerate(generation.members)
    return [position for position, _ in sorted(members, key=lambda one: (roles.index(one[1].role), one[0]))]


def joined(one: Any, other: Any) -> Any:
    """Two trees in one; what both have is alike."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one
    return one | {key: joined(one[key], value) if key in one else value for key, value in other.items()}
