"""The `parameter-server` strategy, synchronous: servers hold and update the parameters, to the bits of the ring."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quorate.core.generation import Role
from quorate.core.worker_status import OTHERS
from quorate.lanes.buckets import Bucket
from quorate.observe.events import BlocksPlaced, LinksMeasured
from quorate.reduce.connect import Endpoint, Neighbour, connect, watch
from quorate.reduce.memory import GradientMemory, zeros
from quorate.reduce.reduction import Reduction
from quorate.reduce.shared_memory import SharedMemoryReduction
from quorate.spec.job import JobSpec
from quorate.strategies.agreement import StepAgreement
from quorate.strategies.compression.deltas import Deltas
from quorate.strategies.compression.methods import check_compressible, method_of, residuals_of
from quorate.strategies.compression.option import lane_compression
from quorate.strategies.kinds import Holdings
from quorate.strategies.ring import measured
from quorate.strategies.servers.align import Aligner, Pending, blocks_placed, tell_placement
from quorate.strategies.servers.compress import Answers, LaneEncoder
from quorate.strategies.servers.connect_star import connect_star
from quorate.strategies.servers.encoded_exchange import EncodedExchange
from quorate.strategies.servers.exchange import Exchange
from quorate.strategies.servers.layout import OnServers, writing_order
from quorate.strategies.servers.linked_reduction import LinkedReduction
from quorate.strategies.servers.option import ServersSpec
from quorate.strategies.servers.placement import Holders, place
from quorate.strategies.servers.row_exchange import RowExchange
from quorate.strategies.servers.row_gradients import RowGradients, check_row_optimizers
from quorate.strategies.servers.rows import Table
from quorate.strategies.servers.share import Share
from quorate.strategies.servers.shared_exchange import SharedExchange
from quorate.strategies.servers.spokes import Spokes
from quorate.strategies.servers.staged_exchange import StagedExchange
from quorate.strategies.servers.star import Star
from quorate.strategies.servers.step import ServerStep, StepParts, WorkerStep
from quorate.strategies.servers.units.connection import UnitConnection, connect_units
from quorate.strategies.servers.units.record import UnitRecord
from quorate.strategies.servers.update import HeldGradients, check_optimizers
from quorate.training.activity import Activity
from quorate.training.divergence import ReplicaDigests
from quorate.training.flat_gradients import FlatGradients
from quorate.training.gradients import Gradients, gradient_plan, parameters_by_rows, refuse_rows
from quorate.training.progress import Progress
from quorate.training.replica import Replica
from quorate.training.strategy import Strategy
from quorate.training.update import Update

log = logging.getLogger(__name__)


def servers_factory(spec: JobSpec, replica: Replica, held: Holdings) -> "ServersFactory":
    """What connects workers and servers in each generation."""
    return ServersFactory(spec, replica, held.role, held.lane_memory)


class ServersFactory:
    """Connects the members of each generation: in shared memory on one host; elsewhere each worker to each server.

    What this member holds, and a step that it may have to complete, outlive a generation.
    """

    def __init__(self, spec: JobSpec, replica: Replica, role: Role, lane_memory: int | None = None) -> None:
        assert isinstance(spec.strategy, ServersSpec)
        check_optimizers(replica.optimizers)
        self.by_rows = parameters_by_rows(replica.model, replica.trainable)
        check_row_optimizers(replica.optimizers.by_name, replica.trainable, self.by_rows)
        replica.optimizers.unfuse({replica.trainable[block][1] for block in self.by_rows})
        if not spec.strategy.is_synchronous:
            refuse_rows(replica.model, replica.trainable, f"mode: {spec.strategy.mode}")
        self._spec = spec
        self._replica = replica
        self._replicas = spec.strategy.replicas
        self._plan = gradient_plan(replica.trainable, spec.bucket_mb, self.by_rows)
        # Rows of tables travel as they are: they are few already.
        self._dense = frozenset(range(len(replica.trainable))) - self.by_rows
        compress = lane_compression(spec.strategy)
        if compress is not None:
            check_compressible([replica.trainable[block] for block in sorted(self._dense)])
        by_deltas = self._dense if compress is not None and compress.feedback else frozenset[int]()
        is_dealt = not spec.strategy.is_synchronous
        self.share = Share(
            replica,
            role,
            units=UnitRecord(spec.lanes) if is_dealt and role is not Role.WORKER else None,
            by_deltas=by_deltas,
            residuals=residuals_of(spec, self._plan, lane_memory),
            # The gradients of a single lane are where autograd has put them.
            as_they_lie=not replica.device.is_host or (spec.lanes == 1 and compress is None),
        )
        self.layout = OnServers(self.share)
        self.pending: Pending | None = None
        self.norms: Mapping[str, float] | None = None

    def connect(self, endpoint: Endpoint) -> "ServersConnection | UnitConnection":
        generation, replica, worker = endpoint.generation, self._replica, endpoint.credentials.worker
        placement = self._place(endpoint)
        if not self._spec.strategy.is_synchronous:
            return connect_units(self._spec, self.share, endpoint, placement)
        plan, compress = self._plan, lane_compression(self._spec.strategy)
        positions = [[generation.position(server) for server in holders] for holders in placement]
        device = replica.device
        allocate = zeros if device.is_host else device.shareable.zeros_on_host
        links, memory = connect(endpoint, plan if compress is None else (), allocate=allocate)
        if compress is not None:
            # What is encoded goes over links, on one host too: lanes need no memory that others see.
            memory = GradientMemory.of_process(plan, endpoint.hosting[endpoint.position], replica.device.zeros)
        peers: dict[int, Neighbour] = {}
        try:
            exchange: Exchange
            spokes = None
            if self.by_rows or compress is not None or not isinstance(links, SharedMemoryReduction):
                peers = connect_star(endpoint, links)
                spokes = Spokes(generation, worker, peers, *watch(endpoint, list(peers.values())))
            if compress is not None and spokes is not None:
                exchange = EncodedExchange(spokes, plan, positions, self._dense, method_of(compress), self.deltas())
            elif isinstance(links, SharedMemoryReduction):
                exchange = SharedExchange(generation, worker, links, plan)
            else:
                assert spokes is not None, "members on several hosts are linked"
                exchange = Star(spokes, plan, positions, memory.lanes)
            exchange, memory = self._staged(endpoint, exchange, memory)
            rows = None
            if spokes is not None and self.by_rows:
                tables = {block: Table.of(replica.trainable[block][1]) for block in self.by_rows}
                rows = RowExchange(spokes, tables, positions)
            gradients = self._gradients(plan, memory)
        except BaseException:
            for link in peers.values():
                link.close()
            links.close()
            raise
        # Whoever ends the generation ends the waits at these links, too.
        joined = LinkedReduction(links, peers) if peers else links
        return ServersConnection(self._spec, self, endpoint, joined, exchange, gradients, placement, rows)

    def deltas(self) -> Deltas | None:
        """How servers tell of new values; None where they tell them as they are."""
        compress = lane_compression(self._spec.strategy)
        if compress is None or not compress.feedback:
            return None
        parameters = {block: self.share.parameter(block) for block in self._dense}
        dtypes = {block: one.dtype for block, one in parameters.items()}
        sizes = {block: one.numel() for block, one in parameters.items()}
        return Deltas(method_of(compress), dtypes, sizes)

    def _staged(self, endpoint: Endpoint, exchange: Exchange, host: GradientMemory) -> tuple[Exchange, GradientMemory]:
        """The same where tensors are on a device that is not the host, and its memory for a worker's lanes."""
        device, plan = self._replica.device, self._plan
        if device.is_host:
            return exchange, host
        there = GradientMemory({}, ())
        if not self.share.is_server:
            there = GradientMemory.of_process(plan, endpoint.hosting[endpoint.position], device.zeros)
        return StagedExchange(exchange, plan, host, there, device.shareable), there

    def _gradients(self, plan: Sequence[Bucket], memory: GradientMemory) -> Gradients:
        if self.share.is_server:
            return HeldGradients(self.share, self.by_rows, plan if self._spec.lanes > 1 else ())
        trainable, lie = self._replica.trainable, self.share.as_they_lie
        if self.by_rows:
            return RowGradients(trainable, plan, memory, self.by_rows, as_they_lie=lie)
        return FlatGradients(trainable, plan, memory, as_they_lie=lie)

    def _place(self, endpoint: Endpoint) -> tuple[Holders, ...]:
        """Where each block is in this generation; and what of it is this member's."""
        generation, share, own = endpoint.generation, self.share, endpoint.credentials.worker
        staying = [server.worker for server in generation.servers if server.role is Role.SERVER]
        trainable = self._replica.trainable
        sizes = [parameter.nbytes for _, parameter in trainable]
        placement = place([name for name, _ in trainable], staying, self._replicas, sizes)
        share.placed = frozenset(block for block, holders in enumerate(placement) if own in holders)
        share.primary = tuple(block for block, holders in enumerate(placement) if holders[0] == own)
        share.number = staying.index(own) if own in staying else None
        share.writer = writing_order(generation).index(endpoint.position)
        share.servers = len(staying)
        return placement


class ServersConnection:
    """One member's connection to the others of its generation."""

    def __init__(
        self,
        spec: JobSpec,
        factory: ServersFactory,
        endpoint: Endpoint,
        links: Reduction,
        exchange: Exchange,
        gradients: Gradients,
        placement: tuple[Holders, ...],
        rows: RowExchange | None = None,
    ) -> None:
        self.links = links
        self.gradients = gradients
        self._spec = spec
        self._factory = factory
        self._endpoint = endpoint
        self._exchange = exchange
        self._rows = rows
        self._placement = placement

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        factory, generation = self._factory, self._endpoint.generation
        aligner = Aligner(generation, self._endpoint.credentials.worker, self.links, factory.share, activity, hold)
        aligned = aligner.run(progress, self._placement, factory.pending, factory.norms)
        factory.pending = None
        tell_placement(generation, factory.share)
        return aligned

    def placed(self) -> BlocksPlaced:
        return blocks_placed(self._endpoint.generation, self._factory.share, self._placement)

    def measure(self) -> LinksMeasured:
        trainable, by_rows = self._factory.share.replica.trainable, self._factory.by_rows
        # Of what travels by rows only a step can tell how much it is.
        sizes = [0 if block in by_rows else parameter.nbytes for block, (_, parameter) in enumerate(trainable)]
        pushed = sum(size * len(holders) for size, holders in zip(sizes, self._placement, strict=True))
        hosted = self._endpoint.hosting[self._endpoint.position]
        return measured(self._endpoint, self.links, pushed * len(hosted))

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        spec, share, generation = self._spec, self._factory.share, self._endpoint.generation
        own = generation.members[self._endpoint.position]
        agreement = StepAgreement(
            self.links.gather,
            generation.members,
            own,
            [parameter for _, parameter in share.replica.trainable],
            share.replica.buffers,
            None if share.is_server else ReplicaDigests(share.replica),
            share.replica.optimizers.settings,
            skips=spec.on_nonfinite_loss == "skip",
        )
        agreement.audit = update.audit
        factory, exchange = self._factory, self._exchange
        if share.residuals is not None:
            with activity.waiting(OTHERS):
                share.residuals.settle(generation, self._endpoint.position, self.links)
        parts = StepParts(
            generation, own, self.links, exchange, self._rows, agreement, share, update, activity, factory
        )
        if isinstance(self.gradients, HeldGradients):
            deltas = factory.deltas()
            if isinstance(exchange, EncodedExchange) and deltas is not None:
                parts = replace(parts, answers=Answers(share, deltas, exchange))
            return ServerStep(parts, self.gradients, spec.clip_norm)
        if isinstance(exchange, EncodedExchange) and isinstance(self.gradients, FlatGradients):
            parts = replace(parts, encoder=LaneEncoder(exchange, self.gradients, share.residuals))
        return WorkerStep(parts, self.gradients)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._exchange.close()
        self.links.close()
        self.gradients.close()
