"""The members of a generation in which units are applied one by one: how they connect, and what they train with."""

from collections.abc import Callable, Sequence

from quorate.core.generation import Role
from quorate.observe.events import BlocksPlaced, LinksMeasured
from quorate.reduce.connect import Endpoint, connect, watch
from quorate.spec.job import JobSpec
from quorate.strategies.ring import measured
from quorate.strategies.servers.align import blocks_placed, tell_placement
from quorate.strategies.servers.connect_star import connect_star
from quorate.strategies.servers.linked_reduction import LinkedReduction
from quorate.strategies.servers.option import ServersSpec
from quorate.strategies.servers.placement import Holders
from quorate.strategies.servers.share import Share
from quorate.strategies.servers.units.align import Standing, UnitAligner
from quorate.strategies.servers.units.channel import UnitChannel
from quorate.strategies.servers.units.loop import UnitLoop
from quorate.strategies.servers.units.plan import UnitPlan
from quorate.strategies.servers.units.strategy import UnitParts, UnitStrategy
from quorate.training.activity import Activity
from quorate.training.gradients import LoneGradients, gradient_plan
from quorate.training.progress import Progress
from quorate.training.update import Update


def connect_units(spec: JobSpec, share: Share, endpoint: Endpoint, placement: Sequence[Holders]) -> "UnitConnection":
    """Waits for the other members: all of them are joined for gathers, and each worker is linked to each server."""
    reduction, _ = connect(endpoint, ())
    try:
        links = connect_star(endpoint, reduction)
    except BaseException:
        reduction.close()
        raise
    generation, replica = endpoint.generation, share.replica
    deadline, _ = watch(endpoint, list(links.values()))
    staying = [at for at, member in enumerate(generation.members) if member.role is Role.SERVER]
    workers = [at for at, member in enumerate(generation.members) if member.role is Role.WORKER]
    peers = staying if endpoint.position in workers else workers if endpoint.position in staying else []
    channels = {peer: UnitChannel(links[peer], generation.id, deadline) for peer in peers}
    holders = [[generation.position(server) for server in places] for places in placement]
    plan = UnitPlan(gradient_plan(replica.trainable, spec.bucket_mb), holders, staying)
    return UnitConnection(spec, share, endpoint, LinkedReduction(reduction, links), channels, plan, placement)


class UnitConnection:
    """One member's connection to the others of its generation."""

    loop = UnitLoop

    def __init__(
        self,
        spec: JobSpec,
        share: Share,
        endpoint: Endpoint,
        links: LinkedReduction,
        channels: dict[int, UnitChannel],
        plan: UnitPlan,
        placement: Sequence[Holders],
    ) -> None:
        self.links = links
        self.gradients = LoneGradients(share.replica.trainable)
        self._spec = spec
        self._share = share
        self._endpoint = endpoint
        self._channels = channels
        self._plan = plan
        self._placement = placement
        self._standing: Standing | None = None

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        share, generation = self._share, self._endpoint.generation
        worker = self._endpoint.credentials.worker
        aligner = UnitAligner(generation, worker, self.links, share, activity, hold)
        progress, copied, self._standing = aligner.align(progress, self._placement)
        tell_placement(generation, share)
        return progress, copied

    def placed(self) -> BlocksPlaced:
        return blocks_placed(self._endpoint.generation, self._share, self._placement)

    def measure(self) -> LinksMeasured:
        sizes = [parameter.nbytes for _, parameter in self._share.replica.trainable]
        pushed = sum(size * len(holders) for size, holders in zip(sizes, self._placement, strict=True))
        hosted = self._endpoint.hosting[self._endpoint.position]
        return measured(self._endpoint, self.links, pushed * len(hosted))

    def strategy(self, update: Update, activity: Activity) -> UnitStrategy:  # noqa: ARG002
        assert isinstance(self._spec.strategy, ServersSpec)
        assert self._standing is not None, "members are aligned before they train"
        generation = self._endpoint.generation
        parts = UnitParts(
            generation,
            generation.members[self._endpoint.position],
            self.links,
            self._channels,
            self._plan,
            self._share,
            self._spec.strategy,
            activity,
            self._standing,
        )
        return UnitStrategy(parts, self.gradients)

    def close(self) -> None:
        self.links.close()
        self.gradients.close()
