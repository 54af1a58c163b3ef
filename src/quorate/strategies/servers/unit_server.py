"""A server in a segment: one thread for each worker, which answers what the worker asks.

A push is applied to the blocks that this server leads as soon as it comes. To the blocks that it follows it is applied
when the worker tells by which number and rate their primary has applied it: so replicas apply the same updates in the
same order, and the worker takes a unit for done only when all holders have it.
"""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.core.user_code import RAISED, blame_user_code
from quorate.data.sampler import Sampler
from quorate.replica.optimizer_state import load_settings
from quorate.replica.optimizers import Optimizers
from quorate.replica.replica import Replica
from quorate.strategies.agreement import pack, unpack
from quorate.strategies.servers.dealing import AppliedSet, Dealer, Unit, UnitRecord
from quorate.strategies.servers.exchange import Head, UnitChannel, UnitPlan

ADDED, SET = 0, 1
"""What a unit changes of buffers: what is added to them, and what they are set to."""
LOOK = 0.05
"""Seconds between two looks at whether a segment that somebody waits in is over."""

Gradients = Mapping[int, torch.Tensor | None]


Settings = list[list[dict[str, Any]]]
"""Of each optimizer and each of its groups, all but the parameters."""


class StepSettings:
    """What the learning rate and all else is for the units of a step: schedules count steps, not pushes.

    A scheduler only ever goes forward. So the settings of each step are kept as they come up, until the boundary; there
    the scheduler has taken as many steps as the job.
    """

    def __init__(self, optimizers: Optimizers, sampler: Sampler, step: int) -> None:
        self._optimizers = optimizers
        self._sampler = sampler
        self._taken = step
        self._kept: dict[int, Settings] = {}
        self._stood: dict[str, Any] | None = None
        self._each = list(optimizers.by_name.values())
        for optimizer in self._each:
            # Workers have no steps of an optimizer, and a server may be told of the next step first.
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def at(self, step: int) -> Settings:
        """The settings of a step behind the last boundary."""
        if self._stood is None:
            # Not earlier: an evaluation at the boundary may have had schedules react.
            groups = {
                name: {"param_groups": o.state_dict()["param_groups"]} for name, o in self._optimizers.by_name.items()
            }
            self._stood = copy.deepcopy({"optimizers": groups, "schedulers": self._optimizers.scheduler_states()})
        while step not in self._kept:
            coming = max(self._kept, default=self._taken) + 1
            self._move_to(coming - 1)
            if self._optimizers.are_scheduled_by_job:
                self._optimizers.prepare(coming, self._sampler)
            self._kept[coming] = [[_copied(group) for group in one.param_groups] for one in self._each]
        return self._kept[step]

    def learning_rates(self, step: int) -> dict[str, float]:
        return {
            name: float(groups[0]["lr"]) for name, groups in zip(self._optimizers.by_name, self.at(step), strict=True)
        }

    def install(self, settings: Settings, factor: float = 1.0) -> None:
        """Give them to the optimizers, with the learning rates multiplied by a factor."""
        for optimizer, groups in zip(self._each, settings, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(_copied(values))
                if factor != 1.0:
                    group["lr"] = values["lr"] * factor

    def reach(self, boundary: int) -> None:
        """All steps up to here are applied: from now on the settings are those that follow."""
        if boundary > self._taken:
            self.at(boundary)  # also where no unit came: all members stand there with the same
        self._move_to(boundary)
        self._kept.clear()
        self._stood = None

    def go_back(self) -> None:
        """To the last boundary, where a generation ends before the next one: schedules have gone ahead of the job."""
        if self._stood is not None:
            load_settings(self._optimizers, self._stood)

    def _move_to(self, step: int) -> None:
        if self._kept:
            # A scheduler goes on from what it has left, not from what the last unit has put in its place.
            self.install(self._kept[max(self._kept)])
        while self._taken < step:
            self._taken += 1
            self._optimizers.advance_schedules(self._taken, self._sampler)


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Schedulers write into a learning rate that is a tensor: what is kept of a step must be another."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


class SegmentOver(Exception):  # noqa: N818 (a happening, not a mistake)
    """The segment has failed elsewhere on this server; whoever waits stops waiting."""


class Hub:
    """Turns the dealer for the threads that serve the workers, each of which waits here until its worker has work.

    `complete(step)` is called once for each step after `completed`, in order, when all units of it are applied on every
    block. `late` counts how many updates came between a pull and its push. `begun` is as for the dealer.
    """

    def __init__(
        self,
        applied: AppliedSet,
        boundary: int,
        staleness: int | None,
        complete: Callable[[int], None],
        begun: int,
        completed: int,
    ) -> None:
        self._dealer = Dealer(applied, boundary, staleness, begun)
        self._complete = complete
        self._told = self._began = completed
        self._changed = threading.Condition()
        self._is_over = False
        self.late: Counter[int] = Counter()
        self._tell_steps()

    @property
    def boundary(self) -> int:
        return self._dealer.boundary

    @property
    def largest_gap(self) -> int:
        return self._dealer.largest_gap

    def next(self, done: Unit | None, late: int) -> Unit | None:
        """The next unit for a worker, which has done one before; None at the boundary. Waits until there is one."""
        with self._changed:
            if done is not None:
                self.late[late] += 1
                self._dealer.applied.add(done)
                self._tell_steps()
                self._changed.notify_all()
            while not self._is_over:
                unit = self._dealer.deal()
                if unit is not None or self._dealer.is_complete:
                    return unit
                self._changed.wait(LOOK)
        raise SegmentOver

    def ask_for_boundary(self) -> None:
        """Somebody asks for something that can only be done at a boundary. Each segment has a step at least."""
        with self._changed:
            self._dealer.close_at_furthest(self._began + 1)
            self._changed.notify_all()

    def end(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _tell_steps(self) -> None:
        while self._told < self._dealer.applied.through:
            self._told += 1
            self._complete(self._told)


@dataclass
class UnitServer:
    """Serves the workers of a generation, by their positions, through one segment after the other.

    `before_change` raises where this server may not change its state: its lease is over. With `damps` the rate of a
    unit is lower the later it is.
    """

    position: int
    plan: UnitPlan
    channels: Mapping[int, UnitChannel]
    replica: Replica
    record: UnitRecord
    settings: StepSettings
    before_change: Callable[[], None]
    damps: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        plan, position = self.plan, self.position
        self._led, self._followed = plan.led[position], plan.followed[position]
        self._pushed_here, self._published = plan.pushed[position], plan.published[position]
        self._sends_buffers = self.replica.buffers.exist and position == plan.hub
        self._parameters = [parameter for _, parameter in self.replica.trainable]
        # What a worker has pushed stays until the next push of the same worker.
        sizes = {
            block: (self._parameters[block].numel(), self._parameters[block].dtype) for block in plan.held[position]
        }
        self._pushed = {
            worker: {block: torch.empty(numel, dtype=dtype) for block, (numel, dtype) in sizes.items()}
            for worker in self.channels
        }
        # One unit is applied at a time; those of each primary in the order of their numbers.
        self._changed = threading.Condition()
        self._updates = 0
        self._next = dict.fromkeys(self._followed, 0)
        self._hub: Hub | None = None
        self._error: BaseException | None = None

    def run_segment(self, hub: Hub | None, look: Callable[[], None]) -> None:
        """Serve until all workers have come to the boundary. `look` is called now and then, and may raise."""
        self._hub = hub
        threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"quorate-serve-{worker}", daemon=True)
            for worker in self.channels
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

    def learning_rates(self, step: int) -> dict[str, float]:
        with self._changed:
            return self.settings.learning_rates(step)

    def _serve(self, worker: int) -> None:
        try:
            channel = self.channels[worker]
            while (head := channel.receive())["ask"] != "end":
                match head["ask"]:
                    case "next":
                        channel.send(self._answer_next(head))
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
        for channel in self.channels.values():
            channel.close()
        with self._changed:
            self._changed.notify_all()
        if self._hub is not None:
            self._hub.end()

    def _answer_next(self, head: Head) -> Head:
        assert self._hub is not None, "only the hub is asked for units"
        if head["wants_boundary"]:
            self._hub.ask_for_boundary()
        unit = self._hub.next(None if head["done"] is None else Unit(*head["done"]), head["late"])
        return {"boundary": self._hub.boundary} if unit is None else {"unit": unit}

    def _answer_pull(self, channel: UnitChannel) -> None:
        """Copies, none of them in the middle of an update; and how many updates there were so far."""
        with self._changed:
            values = {b: self._parameters[b].detach().reshape(-1).to("cpu", copy=True) for b in self._led}
            seen = self._updates
        channel.send({"seen": seen}, self._published, values)
        if self._sends_buffers:
            with self._changed:
                buffers = {name: value.to("cpu", copy=True) for name, value in self.replica.buffers.committed()}
            channel.send_bytes(pack({0: buffers}))

    def _push(self, worker: int, channel: UnitChannel, head: Head) -> Head:
        """Apply a unit to what this server leads: the number of this update, by which replicas follow; how many have
        come in between; and what the learning rate is multiplied by, the lane's share of its batch or less."""
        unit, share = Unit(*head["unit"]), head["share"]
        if head["present"] is not None:
            channel.receive_blocks(self._pushed_here, self._pushed[worker])
        changes = unpack(channel.receive_bytes()) if head["changes_buffers"] else {}
        with self._changed:
            self.before_change()
            late = self._updates - head["seen"]
            # As many updates as a step has lanes make it late by one step.
            factor = share / (1 + late / self.record.lanes) if self.damps else share
            number, self._updates = self._updates, self._updates + 1
            self._apply(unit, self._gradients(worker, head, self._led), factor)
            if unit not in self.record.base:
                self._change_buffers(changes)
                self.record.base.add(unit)
            # Where it is computed a second time, what was told first is of no use: that worker is gone.
            self.record.notes[unit] = head["note"]
        return {"number": number, "late": late, "factor": factor}

    def _follow(self, worker: int, head: Head) -> None:
        """Do what primaries have done, to the bit. The updates before come: their workers have their numbers."""
        for primary, number, factor in head["of"]:
            gradients = self._gradients(worker, head, self._followed[primary])
            with self._changed:
                while self._next[primary] != number:
                    if self._error is not None:
                        raise SegmentOver
                    self._changed.wait(LOOK)
                self.before_change()
                self._apply(Unit(*head["unit"]), gradients, factor)
                self._next[primary] += 1
                self._changed.notify_all()

    def _gradients(self, worker: int, head: Head, blocks: tuple[int, ...]) -> Gradients:
        present = int(head["present"], 16) if head["present"] is not None else 0
        return {block: self._pushed[worker][block] if present >> block & 1 else None for block in blocks}

    def _apply(self, unit: Unit, gradients: Gradients, factor: float) -> None:
        lacking = [block for block in gradients if unit not in self.record.blocks[block]]
        changed = set()
        for block in lacking:
            gradient, parameter = gradients[block], self._parameters[block]
            if gradient is not None:
                parameter.grad = gradient.view(parameter.shape).to(parameter.device)
                changed.add(parameter)
        if changed:
            self.settings.install(self.settings.at(unit.step), factor)
            try:
                for name, optimizer in self.replica.optimizers.by_name.items():
                    if not changed.isdisjoint(self.replica.optimizers.parameters(name)):
                        optimizer.step()
            except RAISED as error:
                blame_user_code(error, "optimizer.step()")
                raise
            finally:
                for parameter in changed:
                    parameter.grad = None
        for block in lacking:
            self.record.blocks[block].add(unit)

    def _change_buffers(self, changes: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        buffers = self.replica.buffers
        new = dict(changes.get(SET, {}))
        for name, change in changes.get(ADDED, {}).items():
            value = buffers.get(name)
            new[name] = value + change.to(value.device)
        if new:
            buffers.commit(new)
