"""Buffers that training may change, such as running statistics: committed values, and each lane's scratch copies.

Every lane starts a step from the committed buffers; what the lanes make of them is agreed on in the exchange and
becomes the committed value at apply. A redone step therefore starts from the same buffers as the first try.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from quorate.core.errors import TaskError, UnsupportedModelError
from quorate.lanes.buckets import LANE_0, MEAN, padding
from quorate.observe.quantities import plural
from quorate.replica.device import CPU, Device
from quorate.spec.job import JobSpec

# The count differs between lanes where a small last batch gives them different numbers of micro-batches.
NORM_RULES = {"running_mean": MEAN, "running_var": MEAN, "num_batches_tracked": LANE_0}
FEW_SAMPLES = 4
"""Of fewer the statistics of a batch norm are mostly chance."""


def notice_of_few_samples(model: torch.nn.Module, spec: JobSpec) -> str | None:
    """What to say of a batch norm that normalizes by very few samples: a lane computes its own alone."""
    samples = spec.batch_size // (spec.lanes * spec.accumulate)
    if samples >= FEW_SAMPLES or getattr(spec.strategy, "sync_batch_norm", False):
        return None
    name = next((name for name, module in model.named_modules() if isinstance(module, _BatchNorm)), None)
    if name is None:
        return None
    accumulate = f" / accumulate {spec.accumulate}" if spec.accumulate > 1 else ""
    return (
        f"batch norm ({name or 'the model'}) sees {plural(samples, 'sample')} at a time (batch_size {spec.batch_size} "
        f"/ lanes {spec.lanes}{accumulate}), and normalizes poorly by so few. Use fewer lanes, a larger batch_size, or "
        "another norm, such as GroupNorm."
    )


@dataclass
class _Buffer:
    committed: torch.Tensor
    home: torch.Tensor
    # Modules may share a buffer; each place holds the same tensor.
    places: list[tuple[torch.nn.Module, str]]
    # Where the home lies in flat memory.
    address: int = 0

    @property
    def is_at_home(self) -> bool:
        return all(owner._buffers[key] is self.home for owner, key in self.places)

    @property
    def live(self) -> torch.Tensor:
        owner, attribute = self.places[0]
        value = owner._buffers[attribute]
        return self.home if value is None else value

    @property
    def torn(self) -> bool:
        owner, attribute = self.places[0]
        return any(other._buffers[name] is not owner._buffers[attribute] for other, name in self.places[1:])


class Buffers:
    """All buffers of a model, by name."""

    def __init__(self, model: torch.nn.Module, rules: Mapping[str, str], device: Device = CPU) -> None:
        self.device = device
        self._buffers: dict[str, _Buffer] = {}
        self.rules: dict[str, str] = {}
        first_names: dict[torch.Tensor, str] = {}
        owners = dict(model.named_modules(remove_duplicate=False))  # get_submodule is not for scripted modules
        for name, value in model.named_buffers(remove_duplicate=False):
            owner_name, _, attribute = name.rpartition(".")
            owner = owners[owner_name]
            first = first_names.setdefault(value, name)
            if first == name:
                self._buffers[name] = _Buffer(value.detach().clone(), value, [])
            self._buffers[first].places.append((owner, attribute))
            if isinstance(owner, _NormBase) and attribute in NORM_RULES:
                self.rules[first] = NORM_RULES[attribute]
        self._empty = tuple(
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is None
        )
        self.exist = bool(self._buffers or self._empty)
        self._name_rules(rules)
        self._averaged: dict[torch.dtype, tuple[tuple[str, torch.Tensor], ...]] | None = None
        # Where they lie together, if they do; and while nothing of the user's has changed that.
        self._laid: Any = None  # FlatBuffers, which a job on the host does not import
        self.flat: Any = None
        if not device.is_host:
            self._lay_flat(list(model.parameters()))

    def _name_rules(self, rules: Mapping[str, str]) -> None:
        for pattern, rule in rules.items():
            if rule not in (MEAN, LANE_0):
                raise TaskError(
                    f'buffer_rules: {pattern!r} has the rule {rule!r}; the rules are "{MEAN}" and "{LANE_0}".'
                )
            names = [name for name in self._buffers if fnmatchcase(name, pattern)]
            if not names:
                known = ", ".join(self._buffers) or "none"
                raise TaskError(f"buffer_rules: {pattern!r} names no buffer of the model. Its buffers: {known}.")
            self.rules.update(dict.fromkeys(names, rule))

    def _lay_flat(self, parameters: list[torch.Tensor]) -> None:
        from quorate.replica.flat_buffers import FlatBuffers, can_lie_flat

        values = {name: buffer.committed for name, buffer in self._buffers.items()}
        if not can_lie_flat({name: buffer.home for name, buffer in self._buffers.items()}, parameters):
            return
        self.flat = self._laid = FlatBuffers(values, self.rules, self.device.zeros)
        for name, buffer in self._buffers.items():
            buffer.home, buffer.committed = self.flat.homes[name], self.flat.committed[name]
            buffer.address = buffer.home.data_ptr()
            self._put(buffer)

    def committed(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, buffer.committed) for name, buffer in self._buffers.items())

    def sources(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Where each committed value is found: one of another shape comes in another tensor."""
        return (partial(getattr, buffer, "committed") for buffer in self._buffers.values())

    def get(self, name: str) -> torch.Tensor:
        return self._buffers[name].committed

    @property
    def averaged(self) -> dict[torch.dtype, tuple[tuple[str, torch.Tensor], ...]]:
        """What the rule "mean" is for, by type: each with what follows it where they are summed together.

        All of them have their places in that sum, also where only some are averaged: which term of a sum comes first
        depends on the place, and must not depend on what the lanes have made of the others.
        """
        if self._averaged is None:
            by_type: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
            for name in sorted(name for name, rule in self.rules.items() if rule == MEAN):
                value = self.get(name)
                by_type.setdefault(value.dtype, []).append(
                    (name, value.new_zeros(padding(value.nbytes, value.itemsize)))
                )
            self._averaged = {dtype: tuple(group) for dtype, group in by_type.items()}
        return self._averaged

    def restore(self) -> None:
        if self.flat is not None:
            self.flat.restore()
            for buffer in self._buffers.values():
                if not buffer.is_at_home:
                    self._put(buffer)
            return
        changed = self._changed()
        for name, buffer in self._buffers.items():
            if name in changed or not buffer.is_at_home:
                self._put(buffer)

    def take(self) -> tuple[torch.Tensor, ...] | None:
        """A copy of all buffers as they are now, without a look at them; None where they do not lie together."""
        if self.flat is None:
            return None
        self._check()
        for buffer in self._buffers.values():
            if buffer.home.data_ptr() != buffer.address:
                self.flat = None  # user code has given it other memory
                return None
            if not buffer.is_at_home:
                return None
        taken: tuple[torch.Tensor, ...] = self.flat.take()
        return taken

    def changes_in(self, taken: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """What was changed of what a lane has left, by name."""
        assert self._laid is not None
        values = self._laid.cut(taken)
        pairs = [(value, self.get(name)) for name, value in values.items()]
        return {name: values[name] for name, same in zip(values, self.device.same_bits(pairs), strict=True) if not same}

    def take_changes(self) -> dict[str, torch.Tensor]:
        """Copies of what was changed since the last restore, by name."""
        self._check()
        return {name: self._buffers[name].live.detach().clone() for name in self._changed()}

    def _check(self) -> None:
        for name, owner, attribute in self._empty:
            if owner._buffers.get(attribute) is not None:
                raise UnsupportedModelError(
                    f"Buffer '{name}' was None when the job started and was filled while training: the next lane would "
                    "find what this one left. Give it a tensor in model()."
                )
        torn = next((name for name, buffer in self._buffers.items() if buffer.torn), None)
        if torn is not None:
            raise UnsupportedModelError(
                f"Buffer '{torn}' is shared by several modules, and one of them was given another tensor in training. "
                "Write into the buffer (copy_) instead of assigning a new one."
            )

    def commit(self, values: Mapping[str, torch.Tensor]) -> None:
        """Make these the committed values, in the model too. Whatever else a lane has changed is for `restore`."""
        for name, value in values.items():
            buffer = self._buffers[name]
            if value.shape == buffer.committed.shape and value.dtype == buffer.committed.dtype:
                buffer.committed.copy_(value)
            else:
                buffer.committed = value.clone()
                buffer.home = value.clone()
                self.flat = self._averaged = None
            self._put(buffer)

    def adopt(self) -> None:
        """Commit what the model holds: what the optimizer's step has changed is changed alike in every worker."""
        self.commit(self.take_changes())

    def _changed(self) -> list[str]:
        """Those that the model holds with other bits: batch-norm kernels write without raising a version counter."""
        if not self._buffers:
            return []
        pairs = [(buffer.live, buffer.committed) for buffer in self._buffers.values()]
        return [name for name, same in zip(self._buffers, self.device.same_bits(pairs), strict=True) if not same]

    def _put(self, buffer: _Buffer) -> None:
        with torch.no_grad():
            buffer.home.copy_(buffer.committed)
        for owner, attribute in buffer.places:
            owner._buffers[attribute] = buffer.home
