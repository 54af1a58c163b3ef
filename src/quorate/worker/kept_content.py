"""What a task keeps besides its params and its weights: settings of the model and of optimizers, attributes, globals.

All of it may have been read from a file or an environment variable, and acts on the bits all the same.
"""

import hashlib
import logging
import os
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from pydantic import BaseModel
from torch.utils.data import TensorDataset

from quorate.data.samples import Samples
from quorate.data.whole_data import Content, Unproven, name_of
from quorate.replica.kept_values import generator_state, own_attributes
from quorate.replica.replica import Replica
from quorate.replica.state_watch import users_hooks
from quorate.task.source import source_files
from quorate.task.task import LENGTH, LOG, HostedLoop, Task, parameters_of

MOST_VALUES = 1_000_000
_PLAIN = (type(None), bool, int, float, complex, bytes, tuple)
_BY_REPR = (torch.dtype, torch.device, torch.Size, torch.memory_format, range, slice, type(...), numpy.dtype)
_MAPPINGS = (OrderedDict, defaultdict, Counter)
_OPTIMIZERS_OWN = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0))) - {"param_groups", "defaults", "state"}
_SCHEDULES = frozenset({"step", "_opt_called"})
"""What torch's schedules set in an optimizer."""
_IS_PYTHONS = 1 << 9
"""Flag of a class that was made at run time."""
_CODE = (ModuleType, FunctionType, BuiltinFunctionType, type, logging.Logger)


def kept_by(task: Task, replica: Replica, samples: Samples) -> tuple[dict[str, str | None], str]:
    """Digests of all that is kept, and why one of them does not say all; before a sample is read, which may add to it.

    Nothing in them depends on where the project lies.
    """
    if isinstance(task, HostedLoop):
        return {}, "a training loop of one's own may keep anything in its variables"
    params, why = parameters_of(type(task)), ""
    kept = {name: value for name, value in vars(task).items() if name not in params and name not in (LOG, LENGTH)}
    owners: dict[str, Callable[[], Iterable[Any]]] = {"task": kept.items}
    if replica.sharding is None:
        optimizers = replica.optimizers
        owners["model"] = lambda: [replica.model, *users_hooks(replica.model)]
        owners["optimizer"] = lambda: [*optimizers.by_name.items(), *optimizers.schedulers.items()]
    known = [task, *(tensor for _, tensor in replica.weights()), *_read(samples)]
    found: dict[str, str | None] = {"globals": _of_globals(type(task))}
    for owner, values in owners.items():
        content = _Kept(_root(type(task)), known)
        found[owner] = None
        for each in values():
            try:
                content.add(each)
            except Exception as error:  # of a property, say
                name = f" in {each[0]}" if type(each) is tuple and each[0] else ""
                reason = str(error) if isinstance(error, Unproven) else f"keeps what cannot be read ({error})"
                why = why or f"the {owner} {reason}{name}"
                break
        else:
            found[owner] = content.hash.hexdigest()
    return found, why


def _read(samples: Samples) -> Iterator[object]:
    """What the digest of the data is of."""
    for source, dataset in samples.datasets.items():
        if source in samples.shards or type(dataset) in (list, TensorDataset, torch.Tensor, numpy.ndarray):
            yield dataset
        if type(dataset) is TensorDataset:
            yield from dataset.tensors


def _of_globals(task_type: type[Task]) -> str:
    """Of variables of the task's modules and classes, as far as their bytes are known."""
    found, root = [], _root(task_type)
    files = set(map(str, source_files(task_type)))
    loaded = list(sys.modules.values())
    for module in [each for each in loaded if os.path.realpath(getattr(each, "__file__", None) or "") in files]:
        own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
        for owner in (module, *own):
            for name, value in vars(owner).items():
                if name[:2] == "__" or name == "_abc_impl" or isinstance(value, _CODE):
                    continue
                content = _Kept(root, ())
                try:
                    content.add((name, value))
                except Exception:  # documented: only what is plain counts here
                    continue
                found.append(content.hash.hexdigest())
    return hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()


def _root(task_type: type[Task]) -> str:
    return str(next(iter(source_files(task_type))).parent)


class _Kept(Content):
    """Also of objects, by their classes and attributes. What is `known` counts by its place among these."""

    def __init__(self, root: str, known: Iterable[object]) -> None:
        super().__init__()
        self._root = root
        self._seen = {id(each): number for number, each in enumerate(known)}
        self._held: list[object] = []  # so that no other object gets the id of one
        self._left = MOST_VALUES

    def add(self, value: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise Unproven(f"keeps more than {MOST_VALUES:,} values")
        if type(value) is str:
            super().add(value.replace(self._root, "") if self._root else value)
        elif type(value) in _PLAIN:
            super().add(value)
        elif (number := self._seen.get(id(value))) is not None:
            self._begin(f"again {number}", 0)
        else:
            self._seen[id(value)] = len(self._seen)
            self._held.append(value)
            super().add(value)

    def _add_other(self, value: Any) -> None:
        kind = type(value)
        if kind is torch.nn.Parameter and not vars(value):
            self._add_tensor(value)
        elif isinstance(value, torch.nn.Module):
            inside = [*value._parameters.items(), *value._buffers.items(), *value._modules.items()]
            self._add_all(name_of(kind), [*inside, ("training", value.training), *own_attributes(value)])
        elif isinstance(value, torch.optim.Optimizer):
            others = {name: each for name, each in vars(value).items() if name not in _OPTIMIZERS_OWN | _SCHEDULES}
            self._add_all(name_of(kind), list(others.items()))
        elif kind in _BY_REPR or isinstance(value, numpy.dtype):
            self._begin(f"{name_of(kind)} {value!r}", 0)
        elif isinstance(value, Enum):
            self._begin(f"{name_of(kind)} {value.name}", 0)
        else:
            self._add_collection(value)

    def _add_collection(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, PurePath):
            self.add(("path", str(value)))
        elif isinstance(value, logging.Logger):
            self._begin("logger", 0)
        elif kind is re.Pattern:
            self.add(("pattern", value.pattern, value.flags))
        elif kind in (set, frozenset) and all(type(each) in (str, int) for each in value):
            self._add_all(name_of(kind), sorted(value, key=repr))
        elif kind is deque:
            self._add_all("deque", [value.maxlen, *value])
        elif kind in _MAPPINGS and not (kind is not defaultdict and vars(value)):
            self._add_all(name_of(kind), [getattr(value, "default_factory", None), *value.items()])
        elif (state := generator_state(value)) is not None:
            self.add(("generator", state))
        else:
            self._add_code(value)

    def _add_code(self, value: Any) -> None:
        """What is called: its text is in the source, and what it holds is not."""
        if isinstance(value, FunctionType) and not value.__code__.co_filename.startswith("<"):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items(), *cells, *vars(value).items()]
            self._add_all(f"function {value.__qualname__}", held)
        elif isinstance(value, MethodType):
            self._add_all("method", [value.__func__, value.__self__])
        elif type(value) is partial:
            self._add_all("partial", [value.func, *value.args, *value.keywords.items()])
        elif isinstance(value, BuiltinFunctionType | BuiltinMethodType):
            owner = value.__self__
            self._add_all(f"builtin {value.__qualname__}", [] if isinstance(owner, ModuleType) else [owner])
        elif isinstance(value, type | ModuleType):
            self._begin(f"{type(value).__name__} {getattr(value, '__qualname__', value.__name__)}", 0)
        else:
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, BaseModel):
            inside = [*vars(value).items(), *(value.__pydantic_extra__ or {}).items()]
            self._add_all(name_of(kind), [*inside, *(value.__pydantic_private__ or {}).items()])
        elif _is_all_python(kind):
            self._add_all(name_of(kind), list(vars(value).items()))
        else:
            raise Unproven(f"keeps {name_of(kind)}, whose bytes are not known")


def _is_all_python(kind: type) -> bool:
    """Whether attributes are all that an object of a class holds."""
    bases = [base for base in kind.__mro__ if base is not object]
    return (
        kind.__dictoffset__ != 0
        and kind.__basicsize__ <= object.__basicsize__ + 16
        and all(base.__flags__ & _IS_PYTHONS and not base.__dict__.get("__slots__") for base in bases)
    )
