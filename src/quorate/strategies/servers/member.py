"""What a worker and a server have in common in a generation, whatever the mode."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from quorate.collectives.endpoint import Endpoint
from quorate.collectives.reduction import Reduction
from quorate.core.generation import OTHERS, Generation, Member, Role, name_of
from quorate.observe.events import BlocksPlaced, HeldBlocks, LinksMeasured
from quorate.replica.gradients import Gradients
from quorate.strategies.ring import GATHER_INDEX, measured
from quorate.strategies.servers.placement import Holders
from quorate.strategies.servers.share import Share, writing_order
from quorate.training.activity import Activity

log = logging.getLogger(__name__)


@dataclass
class MemberConnection:
    """A member's connection to the others. `placement` names the servers that hold each block."""

    endpoint: Endpoint
    links: Reduction
    gradients: Gradients
    share: Share
    placement: Sequence[Holders]

    @property
    def generation(self) -> Generation:
        return self.endpoint.generation

    @property
    def own(self) -> Member:
        return self.generation.members[self.endpoint.position]

    def placed(self) -> BlocksPlaced:
        """What each server holds, for whoever looks at the run."""
        sizes = [parameter.nbytes for _, parameter in self.share.replica.trainable]
        held = [
            HeldBlocks(
                server.worker,
                blocks=sum(server.worker in holders for holders in self.placement),
                primary=sum(holders[0] == server.worker for holders in self.placement),
                bytes=sum(size for size, by in zip(sizes, self.placement, strict=True) if server.worker in by),
            )
            for server in self.generation.servers
            if server.role is Role.SERVER
        ]
        return BlocksPlaced(
            step=self.generation.cursor.step,
            generation=str(self.generation.id),
            blocks=len(sizes),
            bytes=sum(sizes),
            servers=tuple(held),
            pushed=self.generation.lanes * sum(one.bytes for one in held),
            pulled=len(self.generation.workers) * sum(sizes),
        )

    def measure(self) -> LinksMeasured:
        trainable = self.share.replica.trainable
        # Of what travels by rows only a step can tell how much it is.
        sizes = [
            0 if block in self.share.by_rows else parameter.nbytes for block, (_, parameter) in enumerate(trainable)
        ]
        pushed = sum(size * len(holders) for size, holders in zip(sizes, self.placement, strict=True))
        return measured(self.endpoint, self.links, pushed * len(self.own.lanes))

    def log_placement(self) -> None:
        if self.share.is_server:
            names = ", ".join(name_of(server.worker) for server in self.generation.servers)
            held, led = len(self.share.placed), len(self.share.primary)
            log.info("holds %d blocks, and is the primary of %d; servers: %s", held, led, names)

    def close(self) -> None:
        self.links.close()
        self.gradients.close()


class MemberStrategy:
    """What the loop trains with, besides its steps. Servers come first in gathers, since they write checkpoints."""

    def __init__(self, connection: MemberConnection, activity: Activity) -> None:
        self.worker = connection.own.worker
        self.hosted = connection.own.lanes
        self.leads = connection.share.number == 0
        self.share = connection.share
        self._links = connection.links
        self.connection = connection
        self._activity = activity
        self._order = writing_order(connection.generation)

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        with self._activity.waiting(OTHERS):
            told = self._links.gather(step, GATHER_INDEX, payload)
        return tuple(told[position] for position in self._order)

    def close(self) -> None:
        self.connection.close()
