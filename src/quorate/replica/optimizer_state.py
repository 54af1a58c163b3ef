"""What optimizers keep, taken up from where it was saved, or from another process."""

from collections import Counter
from collections.abc import Container, Iterable
from contextlib import suppress
from dis import get_instructions
from functools import lru_cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from quorate.checkpoint.pieces import Piece
from quorate.core.errors import RunError
from quorate.replica.device import assign, is_spread
from quorate.replica.kept_values import generator_state
from quorate.replica.optimizers import SOLE, Optimizers, unfuse_if_torn
from quorate.replica.settings import SettingsWatch


def load_state(optimizers: Optimizers, state: dict[str, Any]) -> None:
    """Take up a saved state. A setting that the task gives otherwise now, in a branch, is as it is given now."""
    saved, own = state["optimizers"].keys(), optimizers.by_name.keys()
    if saved != own:
        raise RunError(
            f"the checkpoint was saved with {_named(saved)}, and the task now gives {_named(own)}. Restore "
            "optimizer(), or train from the beginning."
        )
    began_with = state.get("given", optimizers.given)
    for name, optimizer in optimizers.by_name.items():
        _load_exactly(optimizer, state["optimizers"][name])
        _apply_new_settings(optimizers, name, began_with)
    for name, scheduler in optimizers.schedulers.items():
        if name in state["schedulers"]:
            then, now = began_with["schedulers"].get(name), optimizers.given["schedulers"][name]
            resumed = _resumed(state["schedulers"][name], then, now)
            scheduler.load_state_dict(_counting_like(scheduler.state_dict(), resumed))
    optimizers.settings.check_loaded(state, is_as_saved=_same(began_with, optimizers.given))


def load_settings(optimizers: Optimizers, state: dict[str, Any]) -> None:
    """Go on with the settings and schedules of another process of the same job, and with nothing of a parameter."""
    for name, optimizer in optimizers.by_name.items():
        for group, saved in zip(optimizer.param_groups, state["optimizers"][name]["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
    for name, scheduler in optimizers.schedulers.items():
        scheduler.load_state_dict(_counting_like(scheduler.state_dict(), state["schedulers"][name]))
    optimizers.settings.check_loaded(state, is_as_saved=True)


def take_state(optimizers: Optimizers, parameter: torch.Tensor, values: dict[str, Any]) -> None:
    """Go on with this for one parameter; where there is nothing, as if it had never been updated."""
    for optimizer in optimizers.by_name.values():
        optimizer.state.pop(parameter, None)
    if values:
        optimizer = optimizers.by_name[optimizers.places()[parameter][0]]
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        optimizer.state[parameter] = {key: _placed(value, key, parameter, group) for key, value in values.items()}


def kept_of(optimizers: Optimizers, parameter: torch.Tensor) -> dict[str, Any]:
    """What an optimizer keeps of one parameter, to be changed in place."""
    return next((o.state[parameter] for o in optimizers.by_name.values() if parameter in o.state), {})


def unfuse(optimizers: Optimizers, parameters: Container[torch.Tensor]) -> None:
    """Do without fused kernels for the groups of these: torch has none for sparse gradients."""
    for group in (group for optimizer in optimizers.by_name.values() for group in optimizer.param_groups):
        if group.get("fused") and any(parameter in parameters for parameter in group["params"]):
            group["fused"], group["foreach"] = False, None


def unfuse_all_if_torn(
    optimizers: Optimizers, given: Container[torch.Tensor], updated: Container[torch.Tensor]
) -> None:
    """What every process does of them where each has only some: all have to do without fused kernels from the same
    step on. `given` have a gradient in this step, `updated` have had one before."""
    for optimizer in optimizers.by_name.values():
        unfuse_if_torn(optimizer, given.__contains__, updated.__contains__)


def _apply_new_settings(optimizers: Optimizers, name: str, began_with: dict[str, Any]) -> None:
    """Set the settings of an optimizer that are given otherwise now than they were when its state began."""
    then, now = began_with["groups"][name], optimizers.given["groups"][name]
    is_scheduled = name in optimizers.given["scheduled"]
    is_freed = name in began_with["scheduled"] and not is_scheduled
    for group, before, after in zip(optimizers.by_name[name].param_groups, then, now, strict=True):
        saved = {key: value for key, value in group.items() if key != "params"}
        rate = _resumed_rate(saved["lr"], before["lr"], after["lr"], is_scheduled)
        group.update(_resumed(saved, before, after) | {"lr": after["lr"] if is_freed else rate})


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
                optimizer.state[parameter][key] = _spread_like(parameter, value)
            elif isinstance(value, torch.Tensor):
                # Where torch has put it: some values stay on the host, whatever device the parameter is on.
                placed = value.to(optimizer.state[parameter][key].device)
                optimizer.state[parameter][key] = _laid_like(placed, parameter)


def _spread_like(tensor: torch.Tensor, value: torch.Tensor | Piece) -> torch.Tensor:
    """A new tensor that is spread as another is, with these values, of their own type."""
    values = value.values if isinstance(value, Piece) else value
    made = torch.empty_like(tensor.detach(), dtype=values.dtype)
    assign(made, values)
    return made


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


def _counting_like(now: Any, saved: Any) -> Any:
    """The saved state with its counters being counters again (MultiStepLR has one, also within a SequentialLR)."""
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


_SAVED = ("defaults", "state", "param_groups")
_OF_SCHEDULES = ("_step_count", "_opt_called")
"""What a schedule of torch notes at its optimizer."""


class Unsaved:
    """Sees what optimizers of the user's own, and hooks of their steps, keep where no checkpoint has it."""

    def __init__(self, settings: SettingsWatch) -> None:
        self._settings = settings
        self._marks: dict[tuple[int, str], list[Any]] = {}

    def name(self) -> str | None:
        """The attribute of an optimizer of the user's own that its state_dict() does not have, and that is not what it
        was: a number since `begin`, a tensor or a random generator since this was asked last."""
        for number, (optimizer, saved) in enumerate(self._settings.watched):
            if name := self._counted(number, optimizer):
                return name
            kind = type(optimizer)
            if kind.__module__.startswith("torch.optim.") or kind.state_dict is not Optimizer.state_dict:
                continue
            groups = (group["params"] for group in optimizer.param_groups)
            held = {id(each) for each in chain(*groups, *(one.values() for one in optimizer.state.values()))}
            for name, value in vars(optimizer).items():
                is_number = type(value) in (bool, int, float) and name not in _OF_SCHEDULES
                if is_number and value != saved.get(name, value):
                    return f"self.{name}"
                if name not in _SAVED and self._has_changed(number, name, _marks(value, held)):
                    return f"self.{name}"
        return None

    def _has_changed(self, number: int, name: str, marks: list[Any]) -> bool:
        return bool(marks) and self._marks.setdefault((number, name), marks) != marks

    def _counted(self, number: int, optimizer: Optimizer) -> str | None:
        """The number outside that a hook of an optimizer's step has changed, which it declares nonlocal."""
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for hook in (each for some in hooks for each in some.values() if isinstance(each, FunctionType)):
            for name, place in _written(hook.__code__).items():
                with suppress(ValueError):  # it has no value yet
                    value = (hook.__closure__ or ())[place].cell_contents
                    if type(value) in (bool, int, float) and self._has_changed(number, name, [value]):
                        return name
        return None


@lru_cache
def _written(code: CodeType) -> dict[str, int]:
    """The variables outside a function that it sets, with their places among all."""
    names = {each.argval for each in get_instructions(code) if each.opname == "STORE_DEREF"}
    return {name: place for place, name in enumerate(code.co_freevars) if name in names}


def _marks(value: Any, held: set[int]) -> list[tuple[int, Any]]:
    """By which tensors and random generators in a value are seen to have changed, but for those that are `held`."""
    leaves = [leaf for leaf in tree_leaves(value) if id(leaf) not in held]
    states = ((leaf, leaf._version if isinstance(leaf, torch.Tensor) else generator_state(leaf)) for leaf in leaves)
    return [(id(leaf), state) for leaf, state in states if state is not None]
