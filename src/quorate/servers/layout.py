"""The state of a job whose parameters are on servers: each server writes the blocks that it is the primary of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.core.generation import Generation
from quorate.servers.share import Share
from quorate.training.progress import Progress
from quorate.training.state_layout import HeldState, Parts


@dataclass(frozen=True)
class OnServers:
    """Servers write one part each; the first of them writes the base, too. Workers write nothing."""

    share: Share

    def state(self, progress: Progress) -> HeldState:
        share, replica = self.share, self.share.replica
        tree: dict[str, Any] = share.blocks(share.primary)
        if share.number == 0:
            tree = joined(share.base(progress), tree)
        replica.device.synchronize()
        weights = frozenset(name for name, _ in replica.tensors())
        return HeldState(encode(tree), share.compared(), weights, replica.device, is_whole=False)

    def parts(self, held: HeldState, writers: int) -> Parts:  # noqa: ARG002
        """Of its own alone: what the others write is theirs to know."""
        own = tuple(held.encoded.tensors)
        return tuple(own if number == self.share.number else () for number in range(self.share.servers))

    def load(self, encoded: Encoded) -> Progress:
        return self.share.load(decode(encoded.skeleton, encoded.tensors))

    def donors(self, generation: Generation) -> Mapping[int, int]:  # noqa: ARG002
        """Blocks have holders of their own: the strategy moves them."""
        return {}


def joined(one: Any, other: Any) -> Any:
    """Two trees in one; what both have is alike."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one
    return one | {key: joined(one[key], value) if key in one else value for key, value in other.items()}
