"""Activation checkpointing: blocks of the model keep their input alone, and are computed again in the backward pass.

It trades about a third more computing for the memory of what lies in between (`memory.checkpoint_activations`). A block
that is computed again must compute the same, and must leave nothing behind a second time. So the random streams begin
where they did, and its buffers are copies of what they were before the first time: batch norm would otherwise update
its running statistics twice.
"""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import numpy
import torch
from torch.utils.checkpoint import checkpoint

from quorate.core.errors import TaskError

KEY = "memory.checkpoint_activations"
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_NEVER_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_SHOWN = 12


def checkpoint_activations(model: torch.nn.Module, which: bool | str) -> tuple[str, ...]:
    """Have blocks of the model compute again what they would otherwise keep; their names.

    Names, parameters and hooks of the modules stay as they are.
    """
    names = chosen_blocks(model, which)
    for name in names:
        _recompute(model.get_submodule(name))
    return names


def chosen_blocks(model: torch.nn.Module, which: bool | str) -> tuple[str, ...]:
    """The names of those that the key means."""
    return repeated_blocks(model) if which is True else matching_modules(model, str(which), KEY)


def repeated_blocks(model: torch.nn.Module) -> tuple[str, ...]:
    """The blocks that a model repeats; an error if it has none."""
    found = find_repeated(model)
    if not found:
        raise TaskError(
            f"{KEY}: true looks for blocks that the model repeats, and {type(model).__name__} has none: two modules of "
            "one type at least, each made of several, in a Sequential, ModuleList or ModuleDict. Name the modules to "
            f'compute again by a pattern, such as {KEY}: "encoder.*".'
        )
    return found


def find_repeated(model: torch.nn.Module) -> tuple[str, ...]:
    """What a Sequential, ModuleList or ModuleDict holds, if it is made of several modules itself, has parameters, and
    there is another one of its type."""
    held = {
        f"{path}.{name}".lstrip("."): child
        for path, module in model.named_modules()
        if isinstance(module, _CONTAINERS)
        for name, child in module.named_children()
        if not isinstance(child, _NEVER_CALLED) and _is_compound(child)
    }
    count = Counter(type(child) for child in held.values())
    blocks = {name for name, child in held.items() if count[type(child)] > 1}
    # A Sequential around blocks is a stage: what is computed again at once shall be small.
    stages = {
        name
        for name in blocks
        if isinstance(held[name], torch.nn.Sequential) and any(_is_inside(other, name) for other in blocks)
    }
    return _outermost(blocks - stages, model)


def matching_modules(model: torch.nn.Module, pattern: str, key: str) -> tuple[str, ...]:
    """The outermost modules that a key's pattern names, each of which is called."""
    named = [name for name, _ in model.named_modules() if name]
    matching = {name for name in named if fnmatchcase(name, pattern)}
    if not matching:
        raise TaskError(f"{key}: {pattern!r} names no module of the model. Its modules: {shown_modules(model)}.")
    found = _outermost(matching, model)
    for name in found:
        module = model.get_submodule(name)
        if isinstance(module, _NEVER_CALLED):
            raise TaskError(
                f"{key}: {pattern!r} names '{name}', a {type(module).__name__}, which is never called itself. "
                f'Name what it holds: "{name}.*".'
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TaskError(f"{key}: {pattern!r} names '{name}', a scripted module, which is not taken apart.")
    return found


def shown_modules(model: torch.nn.Module) -> str:
    """The names of its first modules, for a message."""
    named = [name for name, _ in model.named_modules() if name]
    return ", ".join(named[:_SHOWN]) + (", …" if len(named) > _SHOWN else "") or "none"


def _outermost(names: set[str], model: torch.nn.Module) -> tuple[str, ...]:
    """In the order of the model; a block within a block would be computed three times."""
    return tuple(
        name for name, _ in model.named_modules() if name in names and not any(_is_inside(name, n) for n in names)
    )


def _is_inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def _is_compound(module: torch.nn.Module) -> bool:
    scripted = isinstance(module, torch.jit.ScriptModule)
    return not scripted and next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _recompute(module: torch.nn.Module) -> None:
    """Wrap its forward(), so that hooks of the module still run once."""
    forward = module.forward
    owners = [inner for inner in module.modules() if inner._buffers]

    def begin() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _AsBefore(owners)

    def recomputed(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        if torch.compiler.is_compiling():
            # In a compiled graph, what is computed again has no effects, and draws the same numbers.
            return checkpoint(forward, *arguments, use_reentrant=False, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=begin, **named)

    module.forward = recomputed


class _AsBefore:
    """Around a block that is computed again: its buffers, and the generators of Python and NumPy, are as they were
    when this was made. Those of torch are seen to by torch. There may be several backward passes, each with its own.

    Buffers are other tensors meanwhile: what autograd has kept of the first ones must not change.
    """

    def __init__(self, owners: Sequence[torch.nn.Module]) -> None:
        self._owners = owners
        self._buffers = [_copies(owner) for owner in owners]
        self._python, self._numpy = random.getstate(), numpy.random.get_state()

    def __enter__(self) -> None:
        self._now = random.getstate(), numpy.random.get_state()
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        self._live = [dict(owner._buffers) for owner in self._owners]
        for owner, buffers in zip(self._owners, self._buffers, strict=True):
            owner._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for owner, live in zip(self._owners, self._live, strict=True):
            owner._buffers.update(live)
        random.setstate(self._now[0])
        numpy.random.set_state(self._now[1])
        del self._live, self._now


def _copies(owner: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in owner._buffers.items()}
