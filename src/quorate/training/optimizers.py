"""The task's optimizers and schedulers, by name; a task with just one has it under the empty name."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from quorate.checkpoint.pieces import Piece
from quorate.core.errors import RunError, TaskError
from quorate.core.user_code import RAISED, blame_user_code, building_code, given, likely_slip, user_code
from quorate.data.sampler import Sampler
from quorate.spec.job import JobSpec
from quorate.training.device import CPU, Device
from quorate.training.settings import Settings, state_of
from quorate.training.sharded_tensors import is_spread, spread_like
from quorate.training.task import Task, knowing_length

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
        self._base_rates = {name: [group["lr"] for group in o.param_groups] for name, o in self.by_name.items()}
        self._schedulers = {} if spec is None else self._build_schedulers(task, spec)
        kinds = [type(optimizer).__module__ for optimizer in self.by_name.values()]
        self._kinds_are_torchs = all(kind.startswith("torch.optim.") for kind in kinds)
        by_optimizer = [(o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks) for o in self.by_name.values()]
        self._hooks: list[Mapping[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        self._hooks += chain.from_iterable(by_optimizer)
        self.settings = Settings(self.by_name, self._schedulers)
        self._given = copy.deepcopy(self._settings())

    @property
    def are_torchs_own(self) -> bool:
        """Whether all of them are torch's, without hooks: then a gradient changes only by operations of torch."""
        return self._kinds_are_torchs and not any(self._hooks)

    @property
    def run_user_code(self) -> bool:
        """Whether code of the task may run in an update; a schedule of torch's own calls functions that it was given.

        Such code may draw from a random generator, and may change the task or the model.
        """
        return bool(self._schedulers) or not self._kinds_are_torchs or any(self._hooks)

    @property
    def hooks(self) -> list[Callable[..., Any]]:
        """What runs before and after the step of one of them."""
        return [hook for hooks in self._hooks for hook in hooks.values()]

    @property
    def schedulers(self) -> list[LRScheduler]:
        return list(self._schedulers.values())

    @property
    def are_scheduled_by_job(self) -> bool:
        """Whether the job file has a schedule: `prepare` follows it."""
        return self._schedule is not None and self._schedule.kind is not None

    def parameters(self, name: str) -> list[torch.Tensor]:
        """What one optimizer updates, in its own order."""
        return [p for group in self.by_name[name].param_groups for p in group["params"] if p.requires_grad]

    def prepare(self, step: int, sampler: Sampler) -> None:
        assert self._schedule is not None
        from quorate.training.rate_schedule import factor_at  # most jobs have no such schedule

        factor = factor_at(self._schedule, step, sampler)
        for name, optimizer in self.by_name.items():
            for group, base in zip(optimizer.param_groups, self._base_rates[name], strict=True):
                group["lr"] = base * factor

    def update(self) -> None:
        """New parameters, by what stands in their `.grad`."""
        try:
            for optimizer in self.by_name.values():
                _unfuse_if_torn(optimizer, _has_gradient, optimizer.state.get)
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
        if self._schedulers or any(self._hooks):
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
        return bool(self._schedulers) and self._steps_by_epoch and sampler.ends_epoch(step)

    def advance_schedules(self, step: int, sampler: Sampler) -> None:
        """A step is done: the task's own schedules move on, or at the end of an epoch where they count epochs."""
        if not self._schedulers or (self._steps_by_epoch and not sampler.ends_epoch(step)):
            return
        try:
            for scheduler in self._schedulers.values():
                if not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()
        except RAISED as error:
            blame_user_code(error, "optimizer.step()")
            raise

    def react(self, metric: float) -> None:
        with user_code("schedule().step()"):
            for scheduler in self._schedulers.values():
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(metric)

    @property
    def learning_rates(self) -> dict[str, float]:
        return {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self.by_name.items()}

    @property
    def reacts(self) -> bool:
        return any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers.values())

    def state(self) -> dict[str, Any]:
        """All that an update depends on besides the parameters."""
        return {
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.by_name.items()},
            "schedulers": self.scheduler_states(),
            "given": self._given,
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

    def load(self, state: dict[str, Any]) -> None:
        """Take up a saved state. A setting that the task gives otherwise now, in a branch, is as it is given now."""
        saved = state["optimizers"].keys()
        if saved != self.by_name.keys():
            raise RunError(
                f"the checkpoint was saved with {_named(saved)}, and the task now gives {_named(self.by_name.keys())}. "
                "Restore optimizer(), or train from the beginning."
            )
        began_with = state.get("given", self._given)
        for name, optimizer in self.by_name.items():
            _load_exactly(optimizer, state["optimizers"][name])
            self._apply_new_settings(name, began_with)
        for name, scheduler in self._schedulers.items():
            if name in state["schedulers"]:
                then, now = began_with["schedulers"].get(name), self._given["schedulers"][name]
                scheduler.load_state_dict(_as_before(_resumed(state["schedulers"][name], then, now), scheduler))
        self.settings.check_loaded(state, is_as_saved=_same(began_with, self._given))

    # --- parameters that are spread over several processes

    def places(self) -> dict[torch.Tensor, tuple[str, int]]:
        """For each parameter its optimizer, and the number that it has in the state of that."""
        return {
            parameter: (name, number)
            for name, optimizer in self.by_name.items()
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """What an optimizer keeps of one parameter, to be changed in place."""
        return next((o.state[parameter] for o in self.by_name.values() if parameter in o.state), {})

    def take_state(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        """Go on with this for one parameter; where there is nothing, as if it had never been updated."""
        for optimizer in self.by_name.values():
            optimizer.state.pop(parameter, None)
        if values:
            optimizer = self.by_name[self.places()[parameter][0]]
            group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
            optimizer.state[parameter] = {key: _placed(value, key, parameter, group) for key, value in values.items()}

    def unfuse(self, parameters: Container[torch.Tensor]) -> None:
        """Do without fused kernels for the groups of these: torch has none for sparse gradients."""
        for group in (group for optimizer in self.by_name.values() for group in optimizer.param_groups):
            if group.get("fused") and any(parameter in parameters for parameter in group["params"]):
                group["fused"], group["foreach"] = False, None

    def unfuse_if_torn(self, given: Container[torch.Tensor], updated: Container[torch.Tensor]) -> None:
        """What every process does of them where each has only some: all have to do without fused kernels from the same
        step on. `given` have a gradient in this step, `updated` have had one before."""
        for optimizer in self.by_name.values():
            _unfuse_if_torn(optimizer, given.__contains__, updated.__contains__)

    def load_settings(self, state: dict[str, Any]) -> None:
        """Go on with the settings and schedules of another process of the same job, and with nothing of a parameter."""
        for name, optimizer in self.by_name.items():
            for group, saved in zip(optimizer.param_groups, state["optimizers"][name]["param_groups"], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(_as_before(state["schedulers"][name], scheduler))
        self.settings.check_loaded(state, is_as_saved=True)

    def _settings(self) -> dict[str, Any]:
        groups = {
            name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for name, optimizer in self.by_name.items()
        }
        return {
            "groups": groups,
            "schedulers": self.scheduler_states(),
            "scheduled": [name for name in self.by_name if self.are_scheduled_by_job or name in self._schedulers],
        }

    def scheduler_states(self) -> dict[str, Any]:
        """What the task's own schedules keep."""
        return {name: state_of(scheduler) for name, scheduler in self._schedulers.items()}

    def _apply_new_settings(self, name: str, began_with: dict[str, Any]) -> None:
        """Set the settings of an optimizer that are given otherwise now than they were when its state began."""
        then, now = began_with["groups"][name], self._given["groups"][name]
        is_scheduled = name in self._given["scheduled"]
        is_freed = name in began_with["scheduled"] and not is_scheduled
        for group, before, after in zip(self.by_name[name].param_groups, then, now, strict=True):
            saved = {key: value for key, value in group.items() if key != "params"}
            rate = _resumed_rate(saved["lr"], before["lr"], after["lr"], is_scheduled)
            group.update(_resumed(saved, before, after) | {"lr": after["lr"] if is_freed else rate})

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


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None


def _unfuse_if_torn(
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


def _named(names: Iterable[str]) -> str:
    named = ", ".join(f"'{name}'" for name in names if name != SOLE)
    return f"the optimizers {named}" if named else "a single optimizer"


def _load_exactly(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load a state and undo torch's casts: it turns an optimizer's float64 or float32 values into the parameter's type,
    which changes their bits."""
    optimizer.load_state_dict(saved)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for key, value in saved["state"].get(index, {}).items():
            if is_spread(parameter) and isinstance(value, torch.Tensor | Piece) and value.shape == parameter.shape:
                optimizer.state[parameter][key] = spread_like(parameter, value)
            elif isinstance(value, torch.Tensor):
                # Where torch has put it: some values stay on the host, whatever device the parameter is on.
                placed = value.to(optimizer.state[parameter][key].device)
                optimizer.state[parameter][key] = _laid_like(placed, parameter)


def _placed(value: Any, key: str, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """What another process's optimizer keeps, where torch would have it here: some kernels count steps on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    if group.get("fused"):
        return _laid_like(value.to(parameter.device), parameter)
    return value if key == "step" and not group.get("capturable") else value.to(parameter.device)


def _laid_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A file has no strides, and fused kernels want those of the parameter."""
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _as_before(saved: dict[str, Any], scheduler: LRScheduler) -> dict[str, Any]:
    """The saved state with its counters being counters again (MultiStepLR has one, also within a SequentialLR)."""
    restored: dict[str, Any] = _counting_like(scheduler.state_dict(), saved)
    return restored


def _counting_like(now: Any, saved: Any) -> Any:
    if isinstance(now, Counter):
        return Counter(saved)
    if isinstance(now, dict) and isinstance(saved, dict):
        return {key: _counting_like(now.get(key), value) for key, value in saved.items()}
    if isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        return list(map(_counting_like, now, saved))
    return saved


def _resumed(saved: Any, began_with: Any, now: Any) -> Any:
    """A saved setting as a job goes on with it: what training has made of it, unless the task gives another now.

    `began_with` is what the job began with that saved it. Of nested settings only those that were changed are new.
    """
    if _same(began_with, now):
        return saved
    parts = (saved, began_with, now)
    if all(isinstance(part, dict) for part in parts):
        known = saved.keys() & began_with.keys()
        new = {k: _resumed(saved[k], began_with[k], now[k]) if k in known else now[k] for k in now}
        return {key: value for key, value in saved.items() if key not in began_with} | new
    if all(isinstance(part, list | tuple) for part in parts) and len({len(part) for part in parts}) == 1:
        return type(now)(_resumed(*items) for items in zip(*parts, strict=True))
    return now


def _resumed_rate(saved: Any, began_with: Any, now: Any, is_scheduled: bool) -> Any:
    """A saved learning rate as a job goes on with it: where it is scheduled, as far along as it was."""
    if _same(began_with, now):
        return saved
    if not is_scheduled or not began_with or _same(saved, began_with):
        return now
    return saved * (now / began_with)


def _same(left: Any, right: Any) -> bool:
    """Whether two settings are equal; not a number equals itself."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    return bool(left == right or (left != left and right != right))  # NaN is what differs from itself
