"""The settings of the optimizers at each step, where several steps are being applied at the same time."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from quorate.data.sampler import Sampler
from quorate.training.optimizers import Optimizers

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
            self._optimizers.load_settings(self._stood)

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
