"""A server in a segment: one thread for each worker, which answers what the worker asks.

A push is applied to the blocks that this server leads as soon as it comes. To the blocks that it follows it is applied
when the worker tells by which number and rate their primary has applied it: so replicas apply the same updates in the
same order, and the worker takes a unit for done only when all holders have it.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from quorate.strategies.agreement import pack, unpack
from quorate.strategies.servers.units.applied import Unit
from quorate.strategies.servers.units.channel import Head, UnitChannel
from quorate.strategies.servers.units.held_blocks import HeldBlocks
from quorate.strategies.servers.units.hub import LOOK, Hub, SegmentOver
from quorate.strategies.servers.units.plan import UnitPlan

log = logging.getLogger(__name__)

Gradients = Mapping[int, torch.Tensor | None]


@dataclass(frozen=True)
class Rate:
    """What the learning rate of a unit is multiplied by: the lane's share of its batch, less if the unit is late."""

    share: float
    lanes: int
    is_damped: bool

    def __call__(self, late: int) -> float:
        # As many updates as a step has lanes make it late by one step.
        return self.share / (1 + late / self.lanes) if self.is_damped else self.share


class UnitServer:
    """Serves the workers of a generation, by their positions, through one segment after the other."""

    def __init__(
        self,
        position: int,
        plan: UnitPlan,
        blocks: HeldBlocks,
        channels: Mapping[int, UnitChannel],
        sizes: Mapping[int, tuple[int, torch.dtype]],
        lanes: int,
        *,
        damps: bool,
        sends_buffers: bool,
    ) -> None:
        self._position = position
        self._plan = plan
        self._blocks = blocks
        self._channels = channels
        self._lanes = lanes
        self._damps = damps
        self._sends_buffers = sends_buffers and position == plan.hub
        self._turns = _Turns(plan.followed[position])
        # What a worker has pushed stays until the next push of the same worker.
        self._pushed = {
            worker: {block: torch.empty(numel, dtype=dtype) for block, (numel, dtype) in sizes.items()}
            for worker in channels
        }
        self._hub: Hub | None = None
        self._error: BaseException | None = None

    def run_segment(self, hub: Hub | None, look: Callable[[], None]) -> None:
        """Serve until all workers have come to the boundary. `look` is called now and then, and may raise."""
        self._hub = hub
        threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"quorate-serve-{worker}", daemon=True)
            for worker in self._channels
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(LOOK)
                    look()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _serve(self, worker: int) -> None:
        try:
            channel = self._channels[worker]
            while (head := channel.receive())["ask"] != "end":
                match head["ask"]:
                    case "next":
                        channel.send(self._next(worker, head))
                    case "pull":
                        self._answer_pull(channel)
                    case "push":
                        channel.send(self._push(worker, channel, head))
                    case "follow":
                        self._follow(worker, head)
                        channel.send({})
        except SegmentOver:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The first failure ends the segment for everybody here, and by the links elsewhere."""
        if self._error is None:
            self._error = error
        for channel in self._channels.values():
            channel.close()
        self._turns.end()
        if self._hub is not None:
            self._hub.end()

    def _next(self, worker: int, head: Head) -> Head:
        assert self._hub is not None, "only the hub is asked for units"
        if head["wants_boundary"]:
            self._hub.ask_for_boundary()
        done = None if head["done"] is None else Unit(*head["done"])
        unit = self._hub.next(worker, done, head["late"])
        return {"boundary": self._hub.boundary} if unit is None else {"unit": unit}

    def _answer_pull(self, channel: UnitChannel) -> None:
        seen, values = self._blocks.read(self._plan.led[self._position])
        channel.send({"seen": seen}, self._plan.published[self._position], values)
        if self._sends_buffers:
            channel.send_bytes(pack({0: self._blocks.buffers()}))

    def _push(self, worker: int, channel: UnitChannel, head: Head) -> Head:
        unit = Unit(*head["unit"])
        if head["present"] is not None:
            channel.receive_blocks(self._plan.pushed[self._position], self._pushed[worker])
        changes = unpack(channel.receive_bytes()) if head["changes_buffers"] else {}
        rate = Rate(head["share"], self._lanes, self._damps)
        number, late, factor = self._blocks.apply_first(
            unit,
            self._gradients(worker, head, self._plan.led[self._position]),
            rate,
            head["seen"],
            head["note"],
            changes,
        )
        return {"number": number, "late": late, "factor": factor}

    def _follow(self, worker: int, head: Head) -> None:
        unit = Unit(*head["unit"])
        for primary, number, factor in head["of"]:
            gradients = self._gradients(worker, head, self._plan.followed[self._position][primary])
            self._turns.take(primary, number, partial(self._blocks.apply_again, unit, gradients, factor))

    def _gradients(self, worker: int, head: Head, blocks: tuple[int, ...]) -> Gradients:
        present = int(head["present"], 16) if head["present"] is not None else 0
        pushed = self._pushed[worker]
        return {block: pushed[block] if present >> block & 1 else None for block in blocks}


class _Turns:
    """Whose turn it is at the blocks of each primary: updates are applied in the order of their numbers."""

    def __init__(self, primaries: Mapping[int, object]) -> None:
        self._next = dict.fromkeys(primaries, 0)
        self._changed = threading.Condition()
        self._is_over = False

    def take(self, primary: int, number: int, apply: Callable[[], None]) -> None:
        """Wait for the updates before this one. All of them come: their workers have their numbers already."""
        with self._changed:
            while self._next[primary] != number:
                if self._is_over:
                    raise SegmentOver
                self._changed.wait(LOOK)
            apply()
            self._next[primary] += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
