"""The `parameter-server` strategy, synchronous: servers hold and update the parameters, to the bits of the ring."""

from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import GradientMemory, zeros
from quorate.collectives.neighbours import Neighbour, watch
from quorate.collectives.shared_memory import SharedMemoryReduction
from quorate.core.generation import Role
from quorate.replica.flat_gradients import FlatGradients
from quorate.replica.gradients import Gradients, check_compressible, gradient_plan, parameters_by_rows, refuse_rows
from quorate.replica.optimizer_state import unfuse
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.strategies.compression.methods import method_of, residuals_of
from quorate.strategies.compression.option import lane_compression
from quorate.strategies.kinds import Holdings
from quorate.strategies.servers.compress import EncodedExchange
from quorate.strategies.servers.dealing import UnitRecord
from quorate.strategies.servers.exchange import Exchange, SharedExchange, StagedExchange, Star
from quorate.strategies.servers.links import LinkedReduction, Spokes, connect_star
from quorate.strategies.servers.option import ServersSpec
from quorate.strategies.servers.placement import Holders, place
from quorate.strategies.servers.rows import RowExchange, RowGradients, Table, check_row_optimizers
from quorate.strategies.servers.share import OnServers, Share, writing_order
from quorate.strategies.servers.step import ServersConnection
from quorate.strategies.servers.unit_loop import UnitConnection, connect_units
from quorate.strategies.servers.update import HeldGradients, check_optimizers


class ServersFactory:
    """Connects the members of each generation: in shared memory on one host; elsewhere each worker to each server.

    What this member holds, its `share`, outlives a generation.
    """

    def __init__(self, spec: JobSpec, replica: Replica, held: Holdings) -> None:
        assert isinstance(spec.strategy, ServersSpec)
        check_optimizers(replica.optimizers)
        by_rows = parameters_by_rows(replica.model, replica.trainable)
        check_row_optimizers(replica.optimizers.by_name, replica.trainable, by_rows)
        unfuse(replica.optimizers, {replica.trainable[block][1] for block in by_rows})
        if not spec.strategy.is_synchronous:
            refuse_rows(replica.model, replica.trainable, f"mode: {spec.strategy.mode}")
        self._spec = spec
        self._replica = replica
        self._replicas = spec.strategy.replicas
        self._plan = gradient_plan(replica.trainable, spec.bucket_mb, by_rows)
        # Rows of tables travel as they are: they are few already.
        self._dense = frozenset(range(len(replica.trainable))) - by_rows
        compress = lane_compression(spec.strategy)
        if compress is not None:
            check_compressible([replica.trainable[block] for block in sorted(self._dense)])
        by_deltas = self._dense if compress is not None and compress.feedback else frozenset[int]()
        is_dealt = not spec.strategy.is_synchronous
        self.share = Share(
            replica,
            held.role,
            units=UnitRecord(spec.lanes) if is_dealt and held.role is not Role.WORKER else None,
            by_deltas=by_deltas,
            by_rows=by_rows,
            residuals=residuals_of(spec, self._plan, held.lane_memory),
            # The gradients of a single lane are where autograd has put them.
            as_they_lie=not replica.device.is_host or (spec.lanes == 1 and compress is None),
        )
        self.layout = OnServers(replica, self.share)

    def connect(self, endpoint: Endpoint) -> ServersConnection | UnitConnection:
        placement = self._place(endpoint)
        if not self._spec.strategy.is_synchronous:
            return connect_units(self._spec, self.share, endpoint, placement)
        generation, replica, worker = endpoint.generation, self._replica, endpoint.credentials.worker
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
            if self.share.by_rows or compress is not None or not isinstance(links, SharedMemoryReduction):
                peers = connect_star(endpoint, links)
                spokes = Spokes(generation, worker, peers, *watch(endpoint, list(peers.values())))
            if compress is not None and spokes is not None:
                method, tells = method_of(compress), compress.feedback
                exchange = EncodedExchange(spokes, plan, positions, self._dense, method, tells_deltas=tells)
            elif isinstance(links, SharedMemoryReduction):
                exchange = SharedExchange(generation, links, plan)
            else:
                assert spokes is not None, "members on several hosts are linked"
                exchange = Star(spokes, plan, positions, memory.lanes)
            exchange, memory = self._staged(endpoint, exchange, memory)
            rows = None
            if spokes is not None and self.share.by_rows:
                tables = {block: Table.of(replica.trainable[block][1]) for block in self.share.by_rows}
                rows = RowExchange(spokes, tables, positions)
            gradients = self._gradients(memory)
        except BaseException:
            for link in peers.values():
                link.close()
            links.close()
            raise
        # Whoever ends the generation ends the waits at these links, too.
        joined = LinkedReduction(links, peers) if peers else links
        return ServersConnection(endpoint, joined, gradients, self.share, placement, self._spec, exchange, rows)

    def _staged(self, endpoint: Endpoint, exchange: Exchange, host: GradientMemory) -> tuple[Exchange, GradientMemory]:
        """The same where tensors are on a device that is not the host, and its memory for a worker's lanes."""
        device, plan = self._replica.device, self._plan
        if device.is_host:
            return exchange, host
        there = GradientMemory({}, ())
        if not self.share.is_server:
            there = GradientMemory.of_process(plan, endpoint.hosting[endpoint.position], device.zeros)
        return StagedExchange(exchange, plan, host, there, device.shareable), there

    def _gradients(self, memory: GradientMemory) -> Gradients:
        plan = self._plan
        if self.share.is_server:
            return HeldGradients(self.share, plan if self._spec.lanes > 1 else ())
        trainable, lie = self._replica.trainable, self.share.as_they_lie
        if self.share.by_rows:
            return RowGradients(trainable, plan, memory, self.share.by_rows, as_they_lie=lie)
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
