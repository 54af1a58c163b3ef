"""The task's optimizers and schedulers, by name; a task with just one has it under the empty name."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from quorate.core.errors import RunError, TaskError
from quorate.core.user_code import building_code, given, likely_slip, user_code
from quorate.spec.job import ScheduleSpec
from quorate.training.schedule import rate_factor
from quorate.training.settings import rate_taken_up, taken_up
from quorate.training.task import Task

SOLE = ""


class Optimizers:
    """Everything that turns a summed gradient into an update, and its state."""

    def __init__(self, task: Task, model: torch.nn.Module, schedule: ScheduleSpec | None) -> None:
        with building_code("optimizer()"):
            made = task.optimizer(model)
        self.by_name: dict[str, Optimizer] = dict(made) if isinstance(made, Mapping) else {SOLE: made}
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._check(names)
        self._schedule = schedule
        self._base_rates = {name: [group["lr"] for group in o.param_groups] for name, o in self.by_name.items()}
        self._schedulers = self._build_schedulers(task)
        self._given = copy.deepcopy(self._settings())

    @property
    def are_torchs_own(self) -> bool:
        """Whether all of them are torch's, without hooks: then a gradient changes only by operations of torch."""
        return not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks) and all(
            type(optimizer).__module__.startswith("torch.optim.")
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            for optimizer in self.by_name.values()
        )

    @property
    def hooks(self) -> list[Callable[..., Any]]:
        """What runs before and after the step of one of them."""
        by_optimizer = [(o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks) for o in self.by_name.values()]
        places: list[Mapping[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        places += chain.from_iterable(by_optimizer)
        return [hook for hooks in places for hook in hooks.values()]

    @property
    def run_user_code(self) -> bool:
        """Whether code of the task may run in an update; a schedule of torch's own calls functions that it was given.

        Such code may draw from a random generator, and may change the task or the model.
        """
        return not self.are_torchs_own or bool(self._schedulers)

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The task's own."""
        return list(self._schedulers.values())

    def parameters(self, name: str) -> list[torch.Tensor]:
        """What one optimizer updates, in its own order."""
        return [p for group in self.by_name[name].param_groups for p in group["params"] if p.requires_grad]

    def prepare(self, step: int, total_steps: int) -> None:
        """Set the learning rates of a step, if the job file schedules them."""
        if self._schedule is None:
            return
        factor = rate_factor(self._schedule, step, total_steps)
        for name, optimizer in self.by_name.items():
            for group, base in zip(optimizer.param_groups, self._base_rates[name], strict=True):
                group["lr"] = base * factor

    def step(self) -> None:
        """Update the parameters, then the task's own schedulers."""
        with user_code("optimizer.step()"):
            for optimizer in self.by_name.values():
                optimizer.step()
            for scheduler in self._schedulers.values():
                if not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()

    def react(self, metric: float) -> None:
        """Step the schedulers that look at an evaluation."""
        with user_code("schedule().step()"):
            for scheduler in self._schedulers.values():
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(metric)

    @property
    def learning_rates(self) -> dict[str, float]:
        """The rate of each optimizer's first group."""
        return {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self.by_name.items()}

    @property
    def reacts(self) -> bool:
        """Whether a scheduler waits for evaluations."""
        return any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers.values())

    def state(self) -> dict[str, Any]:
        """All that an update depends on besides the parameters."""
        return {
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.by_name.items()},
            "schedulers": self._scheduler_states(),
            "given": self._given,
        }

    @property
    def states(self) -> int:
        """How many parameters have a state by now."""
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
        given_then = state.get("given", self._given)
        for name, optimizer in self.by_name.items():
            _load_exactly(optimizer, state["optimizers"][name])
            self._set_anew(name, given_then)
        for name, scheduler in self._schedulers.items():
            if name in state["schedulers"]:
                given = given_then["schedulers"].get(name), self._given["schedulers"][name]
                scheduler.load_state_dict(_as_before(taken_up(state["schedulers"][name], *given), scheduler))

    def _settings(self) -> dict[str, Any]:
        groups = {
            name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for name, optimizer in self.by_name.items()
        }
        return {
            "groups": groups,
            "schedulers": self._scheduler_states(),
            "scheduled": [name for name in self.by_name if self._schedule is not None or name in self._schedulers],
        }

    def _scheduler_states(self) -> dict[str, Any]:
        return {name: _plain(scheduler.state_dict()) for name, scheduler in self._schedulers.items()}

    def _set_anew(self, name: str, given_then: dict[str, Any]) -> None:
        """Set the settings of an optimizer that are given otherwise now than they were when its state began."""
        then, now = given_then["groups"][name], self._given["groups"][name]
        is_scheduled = name in self._given["scheduled"]
        is_freed = name in given_then["scheduled"] and not is_scheduled
        for group, before, after in zip(self.by_name[name].param_groups, then, now, strict=True):
            saved = {key: value for key, value in group.items() if key != "params"}
            rate = rate_taken_up(saved["lr"], before["lr"], after["lr"], is_scheduled)
            group.update(taken_up(saved, before, after) | {"lr": after["lr"] if is_freed else rate})

    def _build_schedulers(self, task: Task) -> dict[str, LRScheduler]:
        schedulers = {}
        for name, optimizer in self.by_name.items():
            with building_code("schedule()"):
                scheduler = task.schedule(optimizer)
            if scheduler is not None:
                schedulers[name] = _checked_scheduler(scheduler)
        if schedulers and self._schedule is not None:
            raise TaskError(
                f"The learning rate is scheduled twice: by the job file (schedule: {self._schedule.kind}) and by the "
                "task's schedule(). Keep one of them."
            )
        return schedulers

    def _check(self, names: dict[torch.nn.Parameter, str]) -> None:
        if not self.by_name:
            raise TaskError("optimizer() gave an empty dict; return an optimizer, or a dict of them by name.")
        owner: dict[torch.Tensor, str] = {}
        for name, optimizer in self.by_name.items():
            _check_kind(name, optimizer)
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


def _check_kind(name: str, optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        what = given(optimizer) if name == SOLE else f"{given(optimizer)} under '{name}'"
        raise TaskError(
            f"optimizer() gave {what}; it must return a torch optimizer, or a dict of them by name."
            f"{likely_slip(optimizer)}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"optimizer() gave {type(optimizer).__name__}, which computes the loss several times a step (its step() "
            "needs a closure), and that is not supported. Use one whose step() needs none, such as SGD or AdamW."
        )


def _checked_scheduler(scheduler: Any) -> LRScheduler:
    # By what it can do: one of one's own need not be a torch class.
    if not all(hasattr(scheduler, method) for method in ("step", "state_dict", "load_state_dict")):
        raise TaskError(
            f"schedule() gave {given(scheduler)}; it must return a scheduler of torch.optim.lr_scheduler, or None."
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
            if isinstance(value, torch.Tensor):
                optimizer.state[parameter][key] = value


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    # A scheduler's state may point at itself by a bound method it patched in; only plain values are state.
    kept = {key: value for key, value in state.items() if not callable(value)}
    return {key: dict(value) if isinstance(value, Counter) else value for key, value in kept.items()}


def _as_before(saved: dict[str, Any], scheduler: LRScheduler) -> dict[str, Any]:
    """The saved state with its counters being counters again (MultiStepLR has one)."""
    counters = {key for key, value in vars(scheduler).items() if isinstance(value, Counter)}
    return {key: Counter(value) if key in counters else value for key, value in saved.items()}
