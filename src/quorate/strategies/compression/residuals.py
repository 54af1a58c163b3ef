"""What compression holds back of each lane's gradient, to be sent later: the error feedback of a job.

It is the only state that belongs to lanes and not to the replica. So it is in the checkpoint, goes with the lane
where another worker hosts it, and survives the death of a worker in the memory of its host. A step that is redone
finds what it found before: what a step leaves is written beside it, and counts when the step is applied. A step that is
void leaves nothing.
"""

import json
import logging
import mmap
import os
from collections.abc import Mapping, Sequence

import numpy
import torch

from quorate.checkpoint.tree import Encoded
from quorate.collectives.memory import buckets_in, layout_of
from quorate.collectives.reduction import Reduction
from quorate.core.errors import OutOfMemory, ResidualsLost
from quorate.core.generation import OTHERS, Generation
from quorate.core.machine import machine_memory, read_limits
from quorate.lanes.buckets import Bucket
from quorate.strategies.compression.compressor import Compressor, EncodedLane
from quorate.strategies.state_copy import Passing
from quorate.training.activity import Activity
from quorate.training.lane import LaneResult

Flat = tuple[torch.Tensor, ...]
"""What a lane keeps: a flat tensor for each bucket."""

_SLOTS = 2
_NOTHING = 0
"""The step of a slot that has nothing whole: a lane keeps something from step 1 on."""


class LaneMemory:
    """The lanes of a job in the memory of one host. Only the worker that hosts a lane writes there.

    Workers of a host pass the same descriptor; without one, the memory is the process's own.
    """

    def __init__(self, plan: Sequence[Bucket], lanes: int, descriptor: int | None = None) -> None:
        self._plan = plan
        self._layout = layout_of(plan)
        self._descriptor = os.memfd_create("quorate-lanes", os.MFD_CLOEXEC) if descriptor is None else descriptor
        page = mmap.PAGESIZE
        self._stride = page + -(-_SLOTS * self._layout.size // page) * page
        os.ftruncate(self._descriptor, lanes * self._stride)  # by everybody, to the same size
        self._content = mmap.mmap(self._descriptor, lanes * self._stride)
        # Of each lane and slot the step that it is of.
        self._steps = numpy.ndarray((lanes, _SLOTS), "<i8", self._content, strides=(self._stride, 8))
        self._reserved: set[int] = set()
        self._begun: dict[int, int] = {}

    def holds(self, lane: int, step: int) -> bool:
        """Whether what the lane has kept after a step is here, and whole."""
        return self._slot_of(lane, step) is not None

    def at(self, lane: int, step: int) -> Flat:
        """What the lane has kept after a step."""
        slot = self._slot_of(lane, step)
        if slot is None:
            raise ValueError(f"lane {lane} has kept nothing here of step {step}")
        return self._kept_at(lane, slot)

    def begin(self, lane: int, kept: int = _NOTHING) -> Flat:
        """Where to write what the lane keeps after another step; what it has kept after step `kept` stays."""
        self._reserve(lane)
        slot = 1 if kept and self._steps[lane, 0] == kept else 0
        # Until it is sealed there is nothing in it that anybody may use.
        self._steps[lane, slot] = _NOTHING
        self._begun[lane] = slot
        return self._kept_at(lane, slot)

    def seal(self, lane: int, step: int) -> None:
        """What was begun is whole, and is what the lane keeps after this step."""
        self._steps[lane, self._begun.pop(lane)] = step

    def _reserve(self, lane: int) -> None:
        """Have all of a lane's memory: too little is an error now, not a signal at the first write."""
        if lane in self._reserved:
            return
        limits = read_limits().free_memory
        free = machine_memory() if limits is None else min(machine_memory(), limits)
        if not self._steps[lane].any() and self._stride > free:
            raise _too_little(lane, self._stride, free)
        try:
            os.posix_fallocate(self._descriptor, lane * self._stride, self._stride)
        except OSError as error:
            raise _too_little(lane, self._stride, free) from error
        self._reserved.add(lane)

    def _slot_of(self, lane: int, step: int) -> int | None:
        return next((slot for slot in range(_SLOTS) if step and self._steps[lane, slot] == step), None)

    def _kept_at(self, lane: int, slot: int) -> Flat:
        start = lane * self._stride + mmap.PAGESIZE + slot * self._layout.size
        return buckets_in(self._content, self._plan, self._layout, start)


def _too_little(lane: int, size: int, free: int) -> OutOfMemory:
    return OutOfMemory(
        f"there is not enough memory for the {size:,} bytes that lane {lane} holds back of its gradients ({free:,} are "
        "free); use fewer `lanes` (which changes what the job computes), or `strategy.compress.feedback: false`."
    )


log = logging.getLogger(__name__)

KEPT_INDEX = 4
"""Tells what is gathered here from what else is at a step."""

LANES = "lanes"
"""Under which name they are in a state."""


def encode_lane(
    compressors: Sequence[Compressor],
    residuals: "Residuals | None",
    step: int,
    result: LaneResult,
    gradient: Sequence[torch.Tensor],
) -> tuple[EncodedLane, ...]:
    """A lane's gradient by each of the compressors, with what it has held back where it holds anything back."""
    if residuals is not None:
        return residuals.encode(compressors, step, result.lane, result.present, gradient)
    return tuple(one.encode(step, result.lane, result.present, gradient) for one in compressors)


class Residuals:
    """What the lanes that this worker hosts have held back after step `applied`, the last that changed the weights."""

    def __init__(self, plan: Sequence[Bucket], lanes: int, descriptor: int | None = None) -> None:
        self.applied = 0
        self._plan = plan
        self._lanes = lanes
        self._memory = LaneMemory(plan, lanes, descriptor)
        self._hosting: tuple[range, ...] = (range(lanes),)
        self._hosted = range(lanes)
        # Of a checkpoint, until it is known who hosts which lane.
        self._restored: dict[int, Flat] = {}

    # --- a step

    def encode(
        self,
        compressors: Sequence[Compressor],
        step: int,
        lane: int,
        present: int,
        gradient: Sequence[torch.Tensor],
    ) -> tuple[EncodedLane, ...]:
        """Encode a lane's gradient together with what it has held back so far, and write down what it holds back then.

        Each block is encoded by one of the compressors. It counts once the step is applied. It is all there when this
        returns: as soon as others have what was sent, one of them may complete the step, and whoever hosts the lane
        then needs the rest.
        """
        before = self._memory.at(lane, self.applied) if self.applied else None
        after = self._memory.begin(lane, self.applied)
        for bucket, values in enumerate(gradient):
            if before is None:
                after[bucket].copy_(values)
            else:
                torch.add(before[bucket], values, out=after[bucket])
        self._keep_absent(present, before, after)
        all_encoded = tuple(compressor.encode(step, lane, present, after) for compressor in compressors)
        for encoded in all_encoded:
            encoded.take_out(after)
        self._memory.seal(lane, step)
        return all_encoded

    def commit(self, step: int) -> None:
        """The step is applied: what it has left is what lanes have held back."""
        self.applied = step

    def _keep_absent(self, present: int, before: Flat | None, after: Flat) -> None:
        """What has no gradient in a step is not touched by it, as an optimizer does not."""
        for number, bucket in enumerate(self._plan):
            for slot in bucket.slots:
                if not present >> slot.index & 1:
                    after[number][slot.place] = 0 if before is None else before[number][slot.place]

    # --- a generation

    def settle(self, generation: Generation, position: int, links: Reduction, activity: Activity) -> None:
        """Have each worker hold what its lanes have held back: from its host's memory, a checkpoint, or another worker.

        All members call it, at the same state. Where nobody has it, ResidualsLost is raised by all of them.
        """
        restored = self._restored
        self._hosting = tuple(member.lanes for member in generation.members)
        self._hosted = self._hosting[position]
        if not self.applied:
            self._restored = {}
            return
        lanes = range(self._lanes)
        here = [lane for lane in lanes if lane in restored or self._memory.holds(lane, self.applied)]
        step = generation.cursor.step
        with activity.waiting(OTHERS):
            told = links.gather(step, KEPT_INDEX, json.dumps(here).encode())
        holders = [frozenset(json.loads(payload)) for payload in told]
        lost = [lane for lane in lanes if not any(lane in held for held in holders)]
        if lost:
            raise _lost(lost, step)
        for lane in self._hosted:
            if lane in restored:
                # Rather than what the memory has: that may be of workers that were given up.
                self._adopt(lane, restored[lane])
        moves = [
            (lane, next(p for p, held in enumerate(holders) if lane in held), host)
            for host, hosted in enumerate(self._hosting)
            for lane in hosted
            if lane not in holders[host]
        ]
        passing = Passing(generation, position, links, activity)
        for lane, giver, host in moves:
            given = None
            if position == giver:
                kept = self._memory.at(lane, self.applied) if lane not in restored else restored[lane]
                given = Encoded({"dict": {}}, dict(zip(self.names(lane), kept, strict=True)))
            encoded, _ = passing.copy(giver, [host], given)
            if encoded is not None:
                self._adopt(lane, [encoded.tensors[name] for name in self.names(lane)])
                log.info("has taken over what lane %d holds back, from a worker elsewhere", lane)
        # Not before: if a member is lost meanwhile, the next generation settles with other hosts.
        self._restored = {}

    def _adopt(self, lane: int, kept: Sequence[torch.Tensor]) -> None:
        for bucket, values in zip(self._memory.begin(lane), kept, strict=True):
            bucket.copy_(values)
        self._memory.seal(lane, self.applied)

    # --- the state of a job

    def names(self, lane: int) -> list[str]:
        """The names of a lane's tensors in a checkpoint, by bucket."""
        return [f"{LANES}.{lane}.0.{bucket}" for bucket in range(len(self._plan))]

    def state(self) -> Encoded:
        """The tree of what all lanes have held back, with the tensors of those that this worker hosts."""
        if not self.applied:
            return Encoded({"dict": {"applied": 0, LANES: []}}, {})
        forms = [[[{"tensor": name} for name in self.names(lane)]] for lane in range(self._lanes)]
        tensors = {
            name: tensor
            for lane in self._hosted
            if self._memory.holds(lane, self.applied)  # not yet where it was just restored
            for name, tensor in zip(self.names(lane), self._memory.at(lane, self.applied), strict=True)
        }
        return Encoded({"dict": {"applied": self.applied, LANES: forms}}, tensors)

    def load(self, skeleton: Mapping[str, object] | None, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take up a state; of another worker's state only where it stands, since it comes without the tensors."""
        form = {} if skeleton is None else skeleton["dict"]
        assert isinstance(form, dict)
        self.applied = int(form.get("applied", 0))
        self._restored = {}
        if len(form.get(LANES, ())) != (self._lanes if self.applied else 0):
            log.warning("the checkpoint is of another number of lanes: what these have held back is left out")
            self.applied = 0
            return
        if not self.applied:
            return
        for lane in range(self._lanes):
            names = self.names(lane)
            if all(name in tensors for name in names):
                self._restored[lane] = tuple(tensors[name] for name in names)

    def joined_to(self, state: Encoded) -> tuple[Encoded, frozenset[str]]:
        """A state with this in it, and the names of its tensors there."""
        own = self.state()
        skeleton = {"dict": state.skeleton["dict"] | {LANES: own.skeleton}}
        return Encoded(skeleton, state.tensors | own.tensors), frozenset(own.tensors)

    def taken_from(self, state: Encoded) -> Encoded:
        """Take up what is in a state; the rest of it."""
        fields = dict(state.skeleton["dict"])
        self.load(fields.pop(LANES, None), state.tensors)
        return Encoded({"dict": fields}, state.tensors)

    def stand_at(self, applied: int) -> None:
        """Take up of another member's state where it stands; what lanes have held back is found when they settle."""
        self.applied = applied
        self._restored = {}

    def names_by_host(self, members: int) -> list[list[str]]:
        """The names of the tensors that each member has, in ring order."""
        if len(self._hosting) != members:
            raise ValueError(f"lanes are hosted by {len(self._hosting)} members, not {members}")
        return [[name for lane in hosted for name in self.names(lane)] for hosted in self._hosting]


def _lost(lanes: Sequence[int], step: int) -> ResidualsLost:
    which = f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {', '.join(map(str, lanes))}"
    return ResidualsLost(
        f"What {which} had held back of the gradients at step {step} (strategy.compress.feedback) was on a host that "
        "is gone."
    )
