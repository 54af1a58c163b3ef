"""A worker in a segment: gets a unit from the hub, pulls the newest values, computes, pushes, until the boundary."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from quorate.core.errors import LossError, UnsupportedModelError
from quorate.core.generation import EXCHANGE, OTHERS
from quorate.lanes.buckets import LANE_0, MEAN
from quorate.replica.losses import called, not_finite
from quorate.replica.optimizers import SOLE
from quorate.replica.replica import Replica
from quorate.strategies.agreement import WorkerNote, check_skippable, pack, unpack
from quorate.strategies.servers.dealing import Unit
from quorate.strategies.servers.exchange import Head, UnitChannel, UnitPlan
from quorate.strategies.servers.unit_server import ADDED, SET
from quorate.training.activity import Activity
from quorate.training.lane import LaneResult
from quorate.training.strategy import NOTHING_ASKED


@dataclass(frozen=True)
class UnitNote:
    """What is known of a unit besides its gradient: the result of the lane, and norms by optimizer, before clipping."""

    result: LaneResult
    norms: dict[str, float] = field(default_factory=dict)

    @property
    def is_skipped(self) -> bool:
        """Whether its loss is not finite: it has no gradient then, and counts as applied."""
        return not_finite(self.result.losses) is not None

    def encode(self) -> str:
        return json.dumps([WorkerNote([self.result], [], NOTHING_ASKED).encode().decode(), self.norms])

    @classmethod
    def decode(cls, told: str) -> "UnitNote":
        note, norms = json.loads(told)
        return cls(WorkerNote.decode(note.encode()).lanes[0], norms)


@dataclass
class UnitWorker:
    """One worker's part of a generation. `compute` runs the lane of a unit, whose gradient it leaves in `.grad`."""

    plan: UnitPlan
    channels: Mapping[int, UnitChannel]
    replica: Replica
    compute: Callable[[Unit], LaneResult]
    batch_samples: Callable[[int], int]
    wants_boundary: Callable[[], bool]
    activity: Activity = field(default_factory=lambda: Activity(lambda *_: None))

    def __post_init__(self) -> None:
        self._hub = self.channels[self.plan.hub]
        self._parameters = [parameter for _, parameter in self.replica.trainable]
        # Where what comes is put together: a parameter may be on another device, or lie in another order.
        self._values = {
            block: torch.empty(parameter.numel(), dtype=parameter.dtype)
            for block, parameter in enumerate(self._parameters)
        }

    def run_segment(self) -> int:
        """Work until the boundary; where it is. The values are those of the boundary then."""
        done, late = None, 0
        while (unit := self._next(done, late)) is not None:
            self.activity.begin_step(unit.step)
            with self.activity.during(EXCHANGE):
                seen = self._pull()
            result = self.compute(unit)
            with self.activity.during(EXCHANGE):
                late = self._push(unit, result, seen)
            self.activity.add_step(self.activity.seconds, 1)
            done = unit
        self._pull()
        for channel in self.channels.values():
            channel.send({"ask": "end"})
        return self._boundary

    def _next(self, done: Unit | None, late: int) -> Unit | None:
        self._hub.send({"ask": "next", "done": done, "late": late, "wants_boundary": self.wants_boundary()})
        with self.activity.waiting(OTHERS):
            answer = self._hub.receive()
        self._boundary: int = answer.get("boundary", 0)
        return Unit(*answer["unit"]) if "unit" in answer else None

    def _pull(self) -> dict[int, int]:
        """Take up the newest values; how many updates each server has put into its own."""
        seen: dict[int, int] = {}
        for channel in self.channels.values():
            channel.send({"ask": "pull"})
        for server, channel in self.channels.items():
            seen[server] = channel.receive()["seen"]
            channel.receive_blocks(self.plan.published[server], self._values)
            if server == self.plan.hub and self.replica.buffers.exist:
                self.replica.buffers.commit(unpack(channel.receive_bytes()).get(0, {}))
        with torch.no_grad():
            for block, parameter in enumerate(self._parameters):
                parameter.copy_(self._values[block].view(parameter.shape))
        return seen

    def _push(self, unit: Unit, result: LaneResult, seen: Mapping[int, int]) -> int:
        """Send the lane's mean gradient to all who hold it; how late it was, in updates that came in between."""
        note = UnitNote(result)
        if note.is_skipped:
            skips = self.replica.spec.on_nonfinite_loss == "skip"
            check_skippable(unit.step, [result], self._parameters, self.replica.buffers, skips=skips)
        has_gradient = bool(result.samples) and not note.is_skipped
        share = result.samples / self.batch_samples(unit.step)
        changes: bytes | None = None
        if has_gradient:
            note = UnitNote(result, self._finish_gradient(unit, result))
            changes = self._changes(unit, result, share)
        head: Head = {
            "unit": unit,
            "present": hex(result.present) if has_gradient else None,
            "changes_buffers": changes is not None,
            "share": share,
            "note": note.encode(),
        }
        blocks = self._flat_gradients() if has_gradient else {}
        for server, channel in self.channels.items():
            parcels = self.plan.pushed[server] if has_gradient else ()
            channel.send(head | {"ask": "push", "seen": seen[server]}, parcels, blocks)
            if changes is not None:
                channel.send_bytes(changes)
        answers = {server: channel.receive() for server, channel in self.channels.items()}
        if any(self.plan.followed.values()):
            self._tell_followers(head, answers)
        return max(int(answer["late"]) for answer in answers.values())

    def _tell_followers(self, head: Head, answers: Mapping[int, Head]) -> None:
        """Have the replicas do what the primaries have done, and in their order."""
        asked = {"ask": "follow", "unit": head["unit"], "present": head["present"]}
        for server, channel in self.channels.items():
            of = [
                (primary, answers[primary]["number"], answers[primary]["factor"])
                for primary in self.plan.followed[server]
            ]
            channel.send(asked | {"of": of})
        for channel in self.channels.values():
            channel.receive()

    def _finish_gradient(self, unit: Unit, result: LaneResult) -> dict[str, float]:
        """Make it the gradient of the mean, and clip it; its norms before that."""
        clip, norms = self.replica.spec.clip_norm, {}
        for name, loss in result.losses.items():
            parameters = self._parameters if name == SOLE else self.replica.optimizers.parameters(name)
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if loss.per_item and gradients:
                if not loss.count > 0:
                    raise LossError(
                        f"The {called(name)} has a count of {loss.count} in {unit}, so it has no mean. No weight was "
                        "changed by this unit. With (sum, count) something in each lane must count here, since each "
                        "is applied by itself (strategy.mode: bounded or asynchronous)."
                    )
                torch._foreach_div_(gradients, loss.count)
            elif result.bad and gradients:
                # It was weighted by what the lane was to read.
                torch._foreach_mul_(gradients, (result.samples + len(result.bad)) / result.samples)
            norms[name] = get_total_norm(gradients) if clip is None else clip_grad_norm_(parameters, clip)
        return dict(zip(norms, self.replica.device.numbers(list(norms.values()))(), strict=True))

    def _flat_gradients(self) -> dict[int, torch.Tensor]:
        """By block; one without a gradient has zeros, which nobody looks at."""
        return {
            block: torch.zeros(parameter.numel(), dtype=parameter.dtype)
            if parameter.grad is None
            else parameter.grad.detach().reshape(-1).to("cpu").contiguous()
            for block, parameter in enumerate(self._parameters)
        }

    def _changes(self, unit: Unit, result: LaneResult, share: float) -> bytes | None:
        """What becomes of buffers: of running statistics what the lane has added, by its share of the batch."""
        buffers = self.replica.buffers
        changes: dict[int, dict[str, torch.Tensor]] = {ADDED: {}, SET: {}}
        for name, value in result.buffers.items():
            rule, before = buffers.rules.get(name), buffers.get(name)
            if rule == MEAN and value.dtype.is_floating_point:
                changes[ADDED][name] = (value - before) * share
            elif rule != LANE_0:
                raise _refused(name, unit)
            elif unit.lane == 0:
                is_counter = not value.dtype.is_floating_point and value.shape == before.shape
                changes[ADDED if is_counter else SET][name] = value - before if is_counter else value
        return pack(changes) if any(changes.values()) else None


def _refused(name: str, unit: Unit) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Buffer '{name}' was changed in {unit}, and there is no rule for what units that are applied one by one make "
        f'of it. Name one in the task: buffer_rules = {{"{name}": "{MEAN}"}} for a running mean of floating-point '
        f'numbers, or {{"{name}": "{LANE_0}"}}; or use strategy.mode: synchronous.'
    )
