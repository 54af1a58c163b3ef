"""Watching for state that would cross from one lane to the next behind our back.

Which lanes share a process depends on the number of workers. What a lane leaves behind in the model or the task, other
than buffers and gradients, would therefore make the result depend on it. So what is assigned while a lane or an
evaluation batch runs is put back at its end, and a mutable value that is left changed is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from operator import is_, methodcaller
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils.hooks import RemovableHandle

from quorate.core.cached import cached_property
from quorate.core.errors import UnsupportedModelError
from quorate.replica.device import digests
from quorate.replica.kept_values import (
    MODULES_OWN,
    Change,
    KeptValues,
    is_internal,
    is_users_own,
    own_attributes,
)
from quorate.replica.replica import IS_TRAINED, MODE, VERSION, Replica, changed_outside
from quorate.task.task import LOG, Task, overrides

SAMPLED = 16 * 2**10
"""Bytes of one parameter, each time of another, that are compared around a lane."""

_DEPENDS = "What one lane leaves for the next would make the result depend on the number of workers."
_NOT_IN_THE_STATE = (
    "It is not part of the model, so no checkpoint holds it, and a resumed job would continue without it. Make it a "
    "buffer or a submodule of the model; the key `average` keeps an exponential average of the weights."
)
_IN_A_LANE = "loss(), or where its samples are read"
_HOOKS = sorted(name for name in MODULES_OWN if name.endswith("_hooks"))
_STRUCTURE = ("_parameters", "_modules")
_VALUES = methodcaller("values")
GONE = object()


class StateWatch:
    """Holds what the task and the modules keep to what they kept when the worker was built.

    Made once in a worker, before the first sample is read, and kept through all generations: a replacement that is
    built later begins with the same.
    """

    def __init__(self, task: Task, replica: Replica) -> None:
        self.task, self.replica = task, replica
        self._kept = KeptValues(replica.model, [task, *replica.optimizers.schedulers.values()], replica.device)
        own_modules = [(path or "model", module) for path, module in replica.model.named_modules()]
        self._kept.look_at(self._around(own_modules))
        self._keeps = self._kept.exist
        modules = [*own_modules, *self._kept.modules]
        self.assigned = Assigned(task, modules)
        self._structure = _Structure(modules)
        self._modes = [(module, module.training) for _, module in self._kept.modules]
        self._reads_here = overrides(task, "collate") or overrides(task, "order")
        self._where = "loss(), collate() or order()" if self._reads_here else "loss()"
        # Around each lane all versions are compared, and the bits of one parameter, in turn: writes through `.data` do
        # not raise a version. Where the bits lie is looked up once, since a state is always loaded in place.
        self._versions: list[int] = []
        views = [(name, p, replica.device.host_view(p)) for name, p in replica.parameters]
        self._samples = [(name, p, view[:SAMPLED]) for name, p, view in views if view is not None]
        self._next = 0
        self._sample = (0, 0)
        self._digests: dict[str, str] | None = None
        self._is_first = True
        self.settings = replica.optimizers.settings.watch
        self.settings.begin()
        self._tensors = [parameter for _, parameter in replica.parameters]

    def before_lane(self) -> list[str]:
        """A lane begins, with the committed buffers and modes; the names of what was put back, which reading its
        samples has assigned."""
        replica = self.replica
        if replica.buffers.exist or list(map(MODE, replica.modules)) != replica.modes:
            replica.begin_lane()
        put_back = self.before_batch() if self._reads_here else []
        self._versions = list(map(VERSION, self._tensors))
        if self._is_first:
            self._digests = digests(self.replica.parameters, self.replica.device)
        elif self._samples:
            _, parameter, content = self._samples[self._next]
            self._sample = parameter.data_ptr(), xxhash.xxh3_64_intdigest(content)
        return put_back

    def after_lane(self) -> list[str]:
        """A lane has ended; the names of what it has assigned, which is put back."""
        if list(map(VERSION, self._tensors)) != self._versions:
            self.replica.check_unchanged(self._versions, "loss()")
        if self._digests is not None:
            after, before, self._digests = digests(self.replica.parameters, self.replica.device), self._digests, None
            for name, digest in before.items():
                if after[name] != digest:
                    raise changed_outside(name, "loss()")
        elif self._samples:
            name, parameter, content = self._samples[self._next]
            if self._sample != (parameter.data_ptr(), xxhash.xxh3_64_intdigest(content)):
                raise changed_outside(name, "loss()")
            self._next = (self._next + 1) % len(self._samples)
        self._is_first = False
        put_back = self.put_back()
        self.settings.check(_IN_A_LANE)
        return put_back

    def check_settings(self) -> None:
        """Refuse what a lane has changed of the optimizers, however it has ended."""
        self.settings.check(_IN_A_LANE)

    def before_batch(self) -> list[str]:
        """A batch has been read: the names of what reading has assigned, which a loader process would have kept."""
        return self.put_back() if self._reads_here else []

    def after_batch(self) -> list[str]:
        """An evaluation batch has ended; the names of what it has assigned, which is put back."""
        put_back = self.put_back()
        self.check("metrics()")
        self.settings.check("metrics(), or where its samples are read")
        return put_back

    def after_lanes(self) -> None:
        """The lanes of a step have ended: refuse what they have changed, before it can reach the weights."""
        if list(map(IS_TRAINED, self._tensors)) != self.replica.trained:
            self.replica.check_trainable()
        self.check(self._where)
        self.settings.check(_IN_A_LANE)

    def after_update(self, where: str) -> None:
        """The optimizer's step has ended: refuse what it has changed outside the model, which no checkpoint holds."""
        assigned = self.put_back()
        if assigned:
            raise UnsupportedModelError(f"'{assigned[0]}' was assigned in {where}. {_NOT_IN_THE_STATE}")
        change = self._kept.change()
        if change is not None:
            raise UnsupportedModelError(f"{_called(change)} was changed in {where}. {_NOT_IN_THE_STATE}")
        if not self.replica.optimizers.are_torchs_own and (name := self._unsaved()):
            raise UnsupportedModelError(
                f"'{name}' of the optimizer was changed in {where}, and its state_dict() does not have it, so a "
                f"resumed job would begin again with it. Keep it in param_groups[0]['{name.removeprefix('self.')}'] "
                "of the optimizer, or in its state."
            )

    @cached_property
    def _unsaved(self) -> Callable[[], str | None]:
        from quorate.replica.optimizer_state import Unsaved  # most optimizers are torch's

        return Unsaved(self.settings).name

    @property
    def devices(self) -> list[torch.device]:
        """Those whose random numbers a lane may draw, besides the host's."""
        return [] if self.replica.device.is_host else [self.replica.parameters[0][1].device]

    def begin_again(self) -> None:
        """A lane begins again: with the buffers and modes with which it began."""
        self.replica.begin_lane()
        self.put_back()

    def check(self, where: str, *, whole: bool = False) -> None:
        """Refuse a mutable value that has been changed. `whole`: compare every byte, however many there are."""
        replaced = self._structure.change()
        if replaced is not None:
            raise UnsupportedModelError(
                f"{replaced} in {where}. Lanes share the model, so it must be whole when the job starts: build all of "
                "it in model()."
            )
        change = self._kept.change(whole=whole) if self._keeps else None
        if change is not None:
            raise UnsupportedModelError(f"{_called(change)} was changed in {where}. {_DEPENDS} {_advice(change)}")

    def put_back(self) -> list[str]:
        """Undo what was assigned; the names of it."""
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        names = [] if self.assigned.is_as_saved() else self.assigned.put_back()
        return names + self._kept.put_back_scratch() if self._keeps else names

    def _around(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, object]]:
        yield from ((f"self.{name}", value) for name, value in vars(self.task).items() if name != LOG)
        for path, module in modules:
            yield from ((f"{path}.{name}", value) for name, value in own_attributes(module))
        owners = [self.task, *(module for _, module in modules)]
        for kind in dict.fromkeys(chain.from_iterable(type(owner).__mro__ for owner in owners)):
            if is_users_own(kind):  # a list in the body of a class is shared by all that have none of their own
                yield from ((f"{kind.__name__}.{name}", v) for name, v in vars(kind).items() if name[:2] != "__")
        for hook in (*self.replica.optimizers.hooks, *_hooks_of(modules)):
            yield from _enclosed(hook)


class Assigned:
    """The attributes of the task and of all modules, by identity, and the hooks of these: what costs in every lane, so
    in one pass over all. A new hook raises torch's counter of handles; one that is gone leaves a shorter dict."""

    def __init__(self, task: Task, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        task._logged()  # so that it is there already when the first number is logged
        self.owners = [Owner.of("self", task, frozenset({LOG}))]
        self.owners += [Owner.of(path, module, MODULES_OWN) for path, module in modules]
        self._hooks = [(path, vars(module)[kind]) for path, module in modules for kind in _HOOKS]
        self._saved_hooks = [dict(hooks) for _, hooks in self._hooks]
        self._handles = RemovableHandle.next_id
        self._dicts = [owner.attributes for owner in self.owners] + [hooks for _, hooks in self._hooks if hooks]
        self.take()

    def take(self) -> None:
        """What the owners have saved is right now."""
        self._lengths = list(map(len, self._dicts))
        saved = [(owner.attributes, name, value) for owner in self.owners for name, value in owner.saved.items()]
        self._places = [place for place, _, _ in saved]
        self._names = [name for _, name, _ in saved]
        self._values = [value for _, _, value in saved]

    def is_as_saved(self) -> bool:
        now = map(dict.get, self._places, self._names, repeat(GONE))
        return (
            list(map(len, self._dicts)) == self._lengths
            and all(map(is_, now, self._values))
            and self._handles == RemovableHandle.next_id
        )

    def put_back(self) -> list[str]:
        return [name for owner in self.owners for name in owner.put_back()] + self.put_back_hooks()

    def put_back_hooks(self) -> list[str]:
        self._handles = RemovableHandle.next_id
        names = []
        for (path, hooks), saved in zip(self._hooks, self._saved_hooks, strict=True):
            if hooks.keys() != saved.keys():
                hooks.clear()
                hooks.update(saved)
                names.append(f"the hooks of {path}")
        return names


class Owner(NamedTuple):
    """The task or a module, with the attributes that it had; `others` are the names that are not compared."""

    path: str
    owner: object
    attributes: dict[str, Any]
    others: frozenset[str]
    built: dict[str, Any]
    saved: dict[str, Any]

    @classmethod
    def of(cls, path: str, owner: object, others: frozenset[str]) -> "Owner":
        attributes = vars(owner)
        built = {name: value for name, value in attributes.items() if name not in others}
        return cls(path, owner, attributes, others, built, dict(built))

    def put_back(self) -> list[str]:
        """Set all as it was; the names of what was not, but for those that torch assigns by itself."""
        now = self.attributes
        added = [name for name in now if name not in self.saved and name not in self.others]
        changed = [name for name, value in self.saved.items() if now.get(name, GONE) is not value]
        for name in added:
            del now[name]
        now.update({name: self.saved[name] for name in changed})
        return [f"{self.path}.{name}" for name in (*added, *changed) if not is_torchs(self.owner, name)]


def is_torchs(owner: object, name: str) -> bool:
    """Whether torch assigns this by itself, such as the weight that weight_norm computes before each forward pass."""
    if not isinstance(owner, torch.nn.Module):
        return False
    # Nor is it news that a metric, which is reset after each batch, counts.
    if is_internal(owner, name) or hasattr(type(owner), "metric_state"):
        return True
    hooks = [hook for hook in owner._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.")]
    return any(name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None)) for hook in hooks)


class _Structure:
    """Which parameters, buffers and submodules the modules have."""

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        # By their methods alone: those of a scripted module are no dicts.
        self._places = [(path, getattr(module, kind)) for path, module in modules for kind in _STRUCTURE]
        self._filled = [registered for _, registered in self._places if len(registered)]
        self._saved = [dict(registered.items()) for _, registered in self._places]
        self._contents = tuple(chain.from_iterable(map(_VALUES, self._filled)))
        self._buffers = [(path, module._buffers, frozenset(module._buffers.keys())) for path, module in modules]
        self._sized = [registered for _, registered in self._places] + [now for _, now, _ in self._buffers]
        self._lengths = list(map(len, self._sized))

    def change(self) -> str | None:
        """What happened to which of them; what a buffer holds is for the model's own rules."""
        is_whole = list(map(len, self._sized)) == self._lengths
        if is_whole and all(map(is_, chain.from_iterable(map(_VALUES, self._filled)), self._contents)):
            return None
        for (path, registered), saved in zip(self._places, self._saved, strict=True):
            now = dict(registered.items())
            for name in {**now, **saved}:
                if now.get(name) is not saved.get(name) or (name in now) != (name in saved):
                    verb = "replaced" if name in now and name in saved else "registered" if name in now else "removed"
                    return f"'{path}.{name}' was {verb}"
        for path, buffers, names in self._buffers:
            for name in names.symmetric_difference(buffers.keys()):
                return f"Buffer '{path}.{name}' was {'removed' if name in names else 'registered'}"
        return None


def _called(change: Change) -> str:
    return f"'{change.name}' ({change.kind})"


def _advice(change: Change) -> str:
    if change.kind == "a random generator":
        return "Draw from the global generators of torch, NumPy or Python: each lane has its own stream there."
    if change.kind == "a lazy parameter":
        return "Give its layer the number of inputs, or run one batch through its module where you build it."
    if change.kind == "a tensor":
        return (
            "Make it a buffer of the model (or its module a submodule), and change it in the optimizer's step; the key "
            "`average` keeps an exponential average of the weights."
        )
    return "Make it a buffer of the model; numbers to look at are for self.log()."


def users_hooks(model: torch.nn.Module) -> Iterator[Any]:
    """What user code has a model call besides its layers: not torch's own hooks, nor ours."""
    for hook in _hooks_of([("", module) for module in model.modules()]):
        called = hook.func if isinstance(hook, partial) else hook
        if not (getattr(called, "__module__", None) or "").startswith("quorate."):
            yield hook


def _hooks_of(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[Any]:
    """Hooks of modules and of their parameters, but for torch's own, such as that of weight_norm."""
    for _, module in modules:
        hooked = [vars(module)[kind] for kind in _HOOKS]
        for parameter in module._parameters.values():
            hooked += [getattr(parameter, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        for hook in chain.from_iterable(hooks.values() for hooks in hooked if hooks):
            if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                yield hook


def _enclosed(hook: Any) -> Iterator[tuple[str, object]]:
    """What something that can be called holds on to: its object, its arguments, and the variables around it."""
    called = f"{getattr(hook, '__name__', 'a hook')}()"
    if isinstance(hook, partial):
        yield from _enclosed(hook.func)
        yield from ((f"an argument of {called}", value) for value in (*hook.args, *hook.keywords.values()))
    elif isinstance(hook, MethodType | BuiltinMethodType):
        yield f"the object of {called}", hook.__self__
    elif not isinstance(hook, FunctionType):
        yield f"the hook {type(hook).__name__}", hook
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, FunctionType):
        return
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from ((f"a default of {called}", value) for value in defaults)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents
