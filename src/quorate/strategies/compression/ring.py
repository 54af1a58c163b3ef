"""The ring with compressed gradients: every lane's few bytes go to everybody, and everybody sums them alike.

A partial sum of sparse gradients is less and less sparse, so nothing is summed on the way. What is sent depends on the
lane alone and lanes are added in the order of the ring, so the bits do not depend on the workers here either.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quorate.checkpoint.tree import Encoded
from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import GradientMemory
from quorate.core.errors import FrameError
from quorate.core.generation import EXCHANGE
from quorate.observe.seldom_events import GradientsCompressed
from quorate.replica.flat_gradients import FlatGradients
from quorate.replica.gradients import check_compressible, gradient_plan
from quorate.replica.replica import Replica
from quorate.replica.state_layout import HeldState, Parts, Replicated, StateLayout, shared_out
from quorate.spec.job import JobSpec
from quorate.strategies.compression.compressor import Compressor, EncodedLane
from quorate.strategies.compression.methods import method_of, residuals_of
from quorate.strategies.compression.option import lane_compression
from quorate.strategies.compression.residuals import Residuals, encode_lane
from quorate.strategies.kinds import Holdings
from quorate.strategies.ring import RingConnection, RingStrategy, StepParts
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.lane import LaneResult
from quorate.training.strategy import Agreement, StepRequest, Strategy
from quorate.training.update import Update

log = logging.getLogger(__name__)

GRADIENTS_INDEX = 5
"""Tells the lanes' encoded gradients from what else is gathered in a step."""

_LANE = struct.Struct("<IQ")


@dataclass(frozen=True)
class WithResiduals(Replicated):
    """Besides what every member holds, each has what its lanes have held back: whoever hosts a lane writes that."""

    residuals: Residuals

    def state(self, progress: Progress) -> HeldState:
        held = super().state(progress)
        encoded, of_lanes = self.residuals.joined_to(held.encoded)
        return replace(held, encoded=encoded, of_lanes=of_lanes)

    def parts(self, held: HeldState, writers: int) -> Parts:
        if not self.residuals.applied:
            return super().parts(held, writers)
        return shared_out(held.common.tensors, self.residuals.names_by_host(writers))

    def load(self, encoded: Encoded) -> Progress:
        return super().load(self.residuals.taken_from(encoded))


class CompressedRingFactory:
    """Connects the workers of each generation of a job whose gradients are compressed."""

    def __init__(self, spec: JobSpec, replica: Replica, held: Holdings) -> None:
        compress = lane_compression(spec.strategy)
        assert compress is not None, "it is chosen for that"
        self.spec = spec
        self.replica = replica
        self._plan = gradient_plan(replica.trainable, spec.bucket_mb)
        self.residuals = residuals_of(spec, self._plan, held.lane_memory)
        self.layout: StateLayout = (
            Replicated(replica) if self.residuals is None else WithResiduals(replica, self.residuals)
        )
        check_compressible(replica.trainable)
        self.compressor = Compressor(method_of(compress), self._plan, spec.lanes)

    def connect(self, endpoint: Endpoint) -> "CompressedRingConnection":
        """Waits for the other workers. Each sums in memory of its own: what is gathered is all that they share."""
        links, _ = connect(endpoint, ())
        memory = GradientMemory.of_process(self._plan, endpoint.hosting[endpoint.position], self.replica.device.zeros)
        gradients = FlatGradients(self.replica.trainable, self._plan, memory)
        held = links, gradients, self.layout, self.compressor, self.residuals
        return CompressedRingConnection(self.spec, self.replica, endpoint, *held)


@dataclass
class CompressedRingConnection(RingConnection):
    """One worker's connection to the others of its generation."""

    gradients: FlatGradients
    compressor: Compressor
    residuals: Residuals | None

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        if self.residuals is not None:
            self.residuals.settle(self.endpoint.generation, self.endpoint.position, self.links, activity)
        return super().strategy(update, activity)

    def _strategy(self, parts: StepParts) -> "CompressedRingStrategy":
        return CompressedRingStrategy(parts, self)

    def traffic(self, step: int, payloads: Sequence[bytes]) -> GradientsCompressed:
        """The bytes of a step: all but the next worker's own goes through here, all but our own comes."""
        sizes, lanes = [len(payload) for payload in payloads], self.spec.lanes
        position, generation = self.endpoint.position, self.endpoint.generation
        following = sizes[(position + 1) % len(sizes)]
        return GradientsCompressed(
            step=step,
            generation=str(generation.id),
            worker=self.own.worker,
            lane_bytes=round(sum(sizes) / lanes),
            lane_bytes_dense=self.compressor.dense_bytes,
            sent_bytes=sum(sizes) - following if len(sizes) > 1 else 0,
            received_bytes=sum(sizes) - sizes[position],
            sent_bytes_dense=sum(self.links.bytes_passed(b.numel(), b.itemsize) for b in self.gradients.total.buckets),
        )

    def _bytes_per_step(self) -> int | None:
        """They are known when there was a step, which `GradientsCompressed` tells."""
        return None


class CompressedRingStrategy(RingStrategy):
    """Gathers every lane's encoded gradient, and sums them in the order that the job fixes."""

    may_lag = False

    def __init__(self, parts: StepParts, connection: CompressedRingConnection) -> None:
        super().__init__(parts)
        self._connection = connection
        # Told once in a generation: steps differ by a few bytes.
        self._payloads: Sequence[bytes] = ()
        self._has_told = False

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        outcome, connection = super().advance(step, results, request), self._connection
        if connection.residuals is not None and not outcome.is_void:
            # What lanes hold back after this step counts now; after a void one they have what they had.
            connection.residuals.commit(step)
        payloads, self._payloads = self._payloads, ()
        if self._has_told:
            return outcome
        self._has_told = True
        return outcome._replace(told=(connection.traffic(step, payloads),))

    def exchange(self, step: int, results: Sequence[LaneResult]) -> None:
        self._activity.enter(EXCHANGE)
        connection = self._connection
        gradients, compressor = connection.gradients, connection.compressor
        own = {
            result.lane: encode_lane(
                (compressor,), connection.residuals, step, result, gradients.lanes[result.lane].buckets
            )[0]
            for result in results
        }
        self._payloads = self._links.gather(step, GRADIENTS_INDEX, pack_lanes(own))
        lanes = {lane: compressor.decode(step, lane, content) for lane, content in unpack_lanes(self._payloads)}
        compressor.add_up(lanes, gradients.total.buckets)


def pack_lanes(lanes: dict[int, EncodedLane]) -> bytes:
    """Several lanes' encoded gradients as one message."""
    pieces = [piece for lane, of in lanes.items() for piece in (_LANE.pack(lane, len(of.payload)), of.payload)]
    return b"".join(pieces)


def unpack_lanes(payloads: Sequence[bytes]) -> list[tuple[int, memoryview]]:
    """Every lane of several messages, with its encoded gradient."""
    lanes = []
    for payload in payloads:
        rest = memoryview(payload)
        while rest:
            if len(rest) < _LANE.size:
                raise FrameError(f"a message of encoded gradients ends with {len(rest)} bytes that are none")
            lane, size = _LANE.unpack_from(rest)
            if len(rest) < _LANE.size + size:
                raise FrameError(f"the encoded gradient of lane {lane} is cut off")
            lanes.append((lane, rest[_LANE.size : _LANE.size + size]))
            rest = rest[_LANE.size + size :]
    return lanes
