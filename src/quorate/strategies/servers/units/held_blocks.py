"""What a server holds in a mode with units: its blocks, which units are in them, and how a unit is applied."""

import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from quorate.core.user_code import RAISED, blame_user_code
from quorate.strategies.servers.units.applied import Unit
from quorate.strategies.servers.units.record import UnitRecord
from quorate.strategies.servers.units.step_settings import StepSettings, learning_rates
from quorate.training.replica import Replica

Changes = Mapping[int, Mapping[str, torch.Tensor]]
"""How buffers change, by name: what is added to them, and what they are set to."""
ADDED, SET = 0, 1


class HeldBlocks:
    """Applies units to the blocks of a server. Any thread may call it: one unit is applied at a time.

    `before_change` raises where this server may not change its state: its lease is over.
    """

    def __init__(
        self, replica: Replica, record: UnitRecord, settings: StepSettings, before_change: Callable[[], None]
    ) -> None:
        self._replica = replica
        self._record = record
        self._settings = settings
        self._before_change = before_change
        self._parameters = [parameter for _, parameter in replica.trainable]
        self._lock = threading.Lock()
        self._updates = 0

    def read(self, blocks: Iterable[int]) -> tuple[int, dict[int, torch.Tensor]]:
        """Copies of blocks, none of them in the middle of an update; and how many updates there were so far."""
        with self._lock:
            values = {block: self._parameters[block].detach().reshape(-1).to("cpu", copy=True) for block in blocks}
            return self._updates, values

    def apply_first(
        self,
        unit: Unit,
        gradients: Mapping[int, torch.Tensor | None],
        rate: Callable[[int], float],
        seen: int,
        note: str,
        changes: Changes,
    ) -> tuple[int, int, float]:
        """Apply a unit to blocks of which this server is the primary, and what else there is of it.

        `seen`: the updates that the values had in them from which the gradient was computed. `rate` is what the
        learning rate is multiplied by, given how many updates have come in between. The number of this update, by
        which replicas follow; how many have come in between; the rate.
        """
        with self._lock:
            self._before_change()
            late = self._updates - seen
            factor = rate(late)
            number, self._updates = self._updates, self._updates + 1
            self._apply(unit, gradients, factor)
            if unit not in self._record.base:
                self._change_buffers(changes)
                self._record.base.add(unit)
            # Where it is computed a second time, what was told first is of no use: that worker is gone.
            self._record.notes[unit] = note
            return number, late, factor

    def apply_again(self, unit: Unit, gradients: Mapping[int, torch.Tensor | None], factor: float) -> None:
        """Apply a unit to blocks of which this server is a replica: what the primary has done, to the bit."""
        with self._lock:
            self._before_change()
            self._apply(unit, gradients, factor)

    def learning_rates(self, step: int) -> dict[str, float]:
        """Those of a step, by the names of the optimizers."""
        with self._lock:
            return learning_rates(self._replica.optimizers, self._settings.at(step))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the committed buffers that training changes."""
        with self._lock:
            return {name: value.to("cpu", copy=True) for name, value in self._replica.buffers.committed()}

    def _apply(self, unit: Unit, gradients: Mapping[int, torch.Tensor | None], factor: float) -> None:
        applied = self._record.blocks
        lacking = [block for block in gradients if unit not in applied[block]]
        changed = set()
        for block in lacking:
            gradient, parameter = gradients[block], self._parameters[block]
            if gradient is not None:
                parameter.grad = gradient.view(parameter.shape).to(parameter.device)
                changed.add(parameter)
        if changed:
            self._settings.install(self._settings.at(unit.step), factor)
            try:
                for name, optimizer in self._replica.optimizers.by_name.items():
                    if not changed.isdisjoint(self._replica.optimizers.parameters(name)):
                        optimizer.step()
            except RAISED as error:
                blame_user_code(error, "optimizer.step()")
                raise
            finally:
                for parameter in changed:
                    parameter.grad = None
        for block in lacking:
            applied[block].add(unit)

    def _change_buffers(self, changes: Changes) -> None:
        """By what the lane has added, and to what it has set."""
        buffers = self._replica.buffers
        added, new = changes.get(ADDED, {}), dict(changes.get(SET, {}))
        for name, change in added.items():
            value = buffers.get(name)
            new[name] = value + change.to(value.device)
        if new:
            buffers.commit(new)
