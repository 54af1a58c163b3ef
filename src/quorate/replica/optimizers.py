"""The task's optimizers and schedulers, by name; a task with just one has it under the empty name."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from quorate.core.errors import TaskError
from quorate.core.user_code import RAISED, blame_user_code, building_code, given, likely_slip, user_code
from quorate.data.sampler import Sampler
from quorate.replica.device import CPU, Device
from quorate.replica.settings import Settings, state_of
from quorate.spec.job import JobSpec
from quorate.task.task import Task, knowing_length

SOLE = ""
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Those whose fused kernels leave out a step where the device tells them to."""


class Optimizers:
    """Everything that turns a summed gradient into an update, and its state; without a job no schedules."""

    def __init__(self, task: Task, model: torch.nn.Module, spec: JobSpec | None, device: Device = CPU) -> None:
        with building_code("optimizer()"):
            made = task.optimizer(model)
        self.by_name: dict[str, Optimizer] = dict(made) if isinstance(made, Mapping) else {SOLE: made}
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._check(names)
        for optimizer in self.by_name.values():
            device.tune(optimizer)
        self._schedule = None if spec is None else spec.schedule
        self.are_scheduled_by_job = self._schedule is not None and self._schedule.kind is not None
        """Whether the job file has a schedule: `prepare` follows it."""
        self._base_rates = {name: [group["lr"] for group in o.param_groups] for name, o in self.by_name.items()}
        self.schedulers: dict[str, LRScheduler] = {} if spec is None else self._build_schedulers(task, spec)
        kinds = [type(optimizer).__module__ for optimizer in self.by_name.values()]
        self._kinds_are_torchs = all(kind.startswith("torch.optim.") for kind in kinds)
        by_optimizer = [(o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks) for o in self.by_name.values()]
        self._hooks: list[Mapping[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        self._hooks += chain.from_iterable(by_optimizer)
        self.settings = Settings(self.by_name, self.schedulers)
        self.given = copy.deepcopy(self._settings())

    @property
    def are_torchs_own(self) -> bool:
        """Whether all of them are torch's, without hooks: then a gradient changes only by operations of torch."""
        return self._kinds_are_torchs and not any(self._hooks)

    @property
    def run_user_code(self) -> bool:
        """Whether code of the task may run in an update; a schedule of torch's own calls functions that it was given.

        Such code may draw from a random generator, and may change the task or the model.
        """
        return bool(self.schedulers) or not self._kinds_are_torchs or any(self._hooks)

    @property
    def hooks(self) -> list[Callable[..., Any]]:
        """What runs before and after the step of one of them."""
        return [hook for hooks in self._hooks for hook in hooks.values()]

    def parameters(self, name: str) -> list[torch.Tensor]:
        """What one optimizer updates, in its own order."""
        return [p for group in self.by_name[name].param_groups for p in group["params"] if p.requires_grad]

    def prepare(self, step: int, sampler: Sampler) -> None:
        assert self._schedule is not None
        from quorate.replica.rate_schedule import factor_at  # most jobs have no such schedule

        factor = factor_at(self._schedule, step, sampler)
        for name, optimizer in self.by_name.items():
            for group, base in zip(optimizer.param_groups, self._base_rates[name], strict=True):
                group["lr"] = base * factor

    def update(self) -> None:
        """New parameters, by what stands in their `.grad`."""
        try:
            for optimizer in self.by_name.values():
                unfuse_if_torn(optimizer, lambda parameter: parameter.grad is not None, optimizer.state.get)
                optimizer.step()
        except RAISED as error:
            blame_user_code(error, "optimizer.step()")
            raise

    def leave_out(self) -> None:
        """An update that is left out while schedules go on: torch's would warn that nobody has called step()."""
        for optimizer in self.by_name.values():
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def can_leave_out(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the device can leave out an update of these by itself, without a trace: by torch's fused kernels, and
        where all that they keep is there already. (A momentum that is left out at the first step is never filled.)"""
        if self.schedulers or any(self._hooks):
            return False
        updated = set(parameters)
        for optimizer in self.by_name.values():
            if type(optimizer) not in _FUSED:
                return False
            for group in optimizer.param_groups:
                if not group["fused"] or isinstance(group["lr"], torch.Tensor):
                    return False
                keeps = type(optimizer) is not torch.optim.SGD or group["momentum"]
                if keeps and not all(optimizer.state.get(p) for p in group["params"] if p in updated):
                    return False
        return True

    def update_unless(self, void: torch.Tensor) -> None:
        """New parameters; as they are where the device finds that the step is void."""
        found = void.to(torch.float32)
        for optimizer in self.by_name.values():
            optimizer.found_inf = found  # type: ignore[attr-defined]  # torch's own way: GradScaler sets it
        try:
            self.update()
        finally:
            for optimizer in self.by_name.values():
                del optimizer.found_inf  # type: ignore[attr-defined]

    @property
    def rates(self) -> list[list[Any]]:
        """The learning rate of each group of each optimizer, which may be set."""
        return [[group["lr"] for group in optimizer.param_groups] for optimizer in self.by_name.values()]

    @rates.setter
    def rates(self, rates: list[list[Any]]) -> None:
        for optimizer, given_rates in zip(self.by_name.values(), rates, strict=True):
            for group, rate in zip(optimizer.param_groups, given_rates, strict=True):
                group["lr"] = rate

    @property
    def _steps_by_epoch(self) -> bool:
        return self._schedule is not None and self._schedule.per == "epoch"

    def end_epoch(self, step: int, sampler: Sampler) -> bool:
        """Whether schedules hear of this step, though it changes nothing: those that count epochs count all of them."""
        return bool(self.schedulers) and self._steps_by_epoch and sampler.ends_epoch(step)

    def advance_schedules(self, step: int, sampler: Sampler) -> None:
        """A step is done: the task's own schedules move on, or at the end of an epoch where they count epochs."""
        if not self.schedulers or (self._steps_by_epoch and not sampler.ends_epoch(step)):
            return
        try:
            for scheduler in self.schedulers.values():
                if not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()
        except RAISED as error:
            blame_user_code(error, "optimizer.step()")
            raise

    def react(self, metric: float) -> None:
        with user_code("schedule().step()"):
            for scheduler in self.schedulers.values():
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(metric)

    @property
    def learning_rates(self) -> dict[str, float]:
        return {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self.by_name.items()}

    @property
    def reacts(self) -> bool:
        return any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self.schedulers.values())

    def state(self) -> dict[str, Any]:
        """All that an update depends on besides the parameters."""
        return {
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.by_name.items()},
            "schedulers": self.scheduler_states(),
            "given": self.given,
        }

    @property
    def states(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.by_name.values())

    def sources(self) -> Iterator[Callable[[], torch.Tensor | None]]:
        """Where each tensor of an optimizer's state is found: an optimizer may put another in its place.

        In the order of parameters and names, not in that of the first steps, which somebody who joined has not seen.
        """
        for optimizer in self.by_name.values():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                values = optimizer.state.get(parameter, {})
                for key in sorted(key for key, value in values.items() if isinstance(value, torch.Tensor)):
                    yield partial(values.get, key)

    def places(self) -> dict[torch.Tensor, tuple[str, int]]:
        """For each parameter its optimizer, and the number that it has in the state of that."""
        return {
            parameter: (name, number)
            for name, optimizer in self.by_name.items()
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }

    def _settings(self) -> dict[str, Any]:
        groups = {
            name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for name, optimizer in self.by_name.items()
        }
        return {
            "groups": groups,
            "schedulers": self.scheduler_states(),
            "scheduled": [name for name in self.by_name if self.are_scheduled_by_job or name in self.schedulers],
        }

    def scheduler_states(self) -> dict[str, Any]:
        """What the task's own schedules keep."""
        return {name: state_of(scheduler) for name, scheduler in self.schedulers.items()}

    def _build_schedulers(self, task: Task, spec: JobSpec) -> dict[str, LRScheduler]:
        schedulers: dict[str, LRScheduler] = {}
        if self._schedule is not None and self._schedule.kind == "range":
            return schedulers
        for name, optimizer in self.by_name.items():
            with building_code("schedule()"), knowing_length(task, spec):
                scheduler = task.schedule(optimizer)
            if scheduler is not None:
                schedulers[name] = _checked_scheduler(scheduler)
        given = self._schedule
        if schedulers and given is not None and given.kind is not None:
            raise TaskError(
                f"The learning rate is scheduled twice: by the job file (schedule: {given.kind}) and by the "
                "task's schedule(). Keep one of them."
            )
        if not schedulers and given is not None and given.kind is None:
            raise TaskError(
                f"The job file says `schedule: {{per: {given.per}}}`, and there is no schedule: the task returns none. "
                "Return one from schedule(), name a `kind` in the job file, or leave `schedule` out."
            )
        return schedulers

    def _check(self, names: dict[torch.nn.Parameter, str]) -> None:
        if not self.by_name:
            raise TaskError("optimizer() returned an empty dict; return an optimizer, or a dict of them by name.")
        owner: dict[torch.Tensor, str] = {}
        for name, optimizer in self.by_name.items():
            _check_kind(name, optimizer)
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                raise TaskError(
                    f"{type(optimizer).__name__}.__init__() does not call super().__init__(params, defaults), as every "
                    "optimizer of torch does."
                )
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter not in names:
                    raise TaskError(
                        "optimizer() updates a tensor that is not a parameter of the model it was given: use the "
                        "parameters of its argument `model`, not those of another model."
                    )
                if owner.setdefault(parameter, name) != name:
                    raise TaskError(
                        f"'{names[parameter]}' belongs to two optimizers, '{owner[parameter]}' and '{name}'. "
                        "Each parameter may have one."
                    )


def unfuse_if_torn(
    optimizer: Optimizer, is_given: Callable[[torch.Tensor], object], is_updated: Callable[[torch.Tensor], object]
) -> None:
    """Torch's fused SGD wants the momentum of all parameters of a group, or of none: where one gets its first gradient
    later than others, the group goes on without it. All workers do so at the same step, and so does who resumes."""
    groups = optimizer.param_groups
    if type(optimizer) is not torch.optim.SGD or len(optimizer.state) == sum(len(group["params"]) for group in groups):
        return
    for group in groups:
        if not group["fused"] or not group["momentum"]:
            continue
        have = {bool(is_updated(p)) for p in group["params"] if is_given(p)}
        if len(have) > 1:
            group["fused"], group["foreach"] = False, None


def _check_kind(name: str, optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        what = given(optimizer) if name == SOLE else f"{given(optimizer)} under '{name}'"
        raise TaskError(
            f"optimizer() returned {what}; it must return a torch optimizer, or a dict of them by name."
            f"{likely_slip(optimizer)}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__}, which computes the loss several times a step (its "
            "step() "
            "needs a closure), and that is not supported. Use one whose step() needs none, such as SGD or AdamW."
        )


def _checked_scheduler(scheduler: Any) -> LRScheduler:
    # By what it can do: one of one's own need not be a torch class.
    if not all(hasattr(scheduler, method) for method in ("step", "state_dict", "load_state_dict")):
        raise TaskError(
            f"schedule() returned {given(scheduler)}; it must return a scheduler of torch.optim.lr_scheduler, or None."
            f"{likely_slip(scheduler)}"
        )
    return scheduler  # type: ignore[no-any-return]
