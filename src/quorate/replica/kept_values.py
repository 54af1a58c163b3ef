"""Mutable values that a task or a module keeps in plain attributes: found once, compared after every step.

A list, a dict, an array, a tensor or a teacher model that one lane changes would be found changed by the next lane of
the same process, and by no other: the result would depend on which lanes share a worker.
"""

import itertools
import random
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from operator import is_
from types import FunctionType, GeneratorType
from typing import Any

import numpy
import torch
import xxhash
from torch.nn.parameter import is_lazy

from quorate.core.user_code import is_installed
from quorate.replica.device import CPU, Device, local

MOST_VALUES = 5_000
"""So many values are looked at, those first that lie least deep; what lies behind them is not."""
MOST_ELEMENTS = 1_000
"""A longer list or dict is not looked into, and is compared in pieces of so many elements, one at each comparison."""
COMPARED_ELEMENTS = 4_000
"""Elements of lists, dicts, sets and objects that are compared one by one at each comparison, in turn."""
PIECE = 64 * 2**10
"""Bytes of tensors and arrays that are compared bit by bit at each comparison, in turn."""
MOST_BYTES = 16 * 2**20
"""Of a larger tensor or array pieces that lie evenly are compared."""

MODULES_OWN = frozenset({*vars(torch.nn.Module()), "_compiled_call_impl"})
"""What torch keeps in the `__dict__` of every module, and of a compiled one (see `Device.as_written`)."""

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
_MEMORY = {dict, OrderedDict}


@dataclass(frozen=True)
class Change:
    """A kept value that is not what it was when the job began."""

    name: str
    kind: str


class KeptValues:
    """All that can be reached from the task and the modules, but for the state of the model and what reads samples."""

    def __init__(self, model: torch.nn.Module, known: Iterable[object] = (), device: Device = CPU) -> None:
        """`known` are objects that others see to."""
        self._device = device
        self.modules: list[tuple[str, torch.nn.Module]] = []
        """Modules that are not part of the model, such as a teacher."""
        tensors = [local(each) for each in (*model.parameters(), *model.buffers()) if each.layout is torch.strided]
        self._state = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._seen = {*map(id, known), *map(id, model.modules())}
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._versions: list[int] = []
        self._cells = _Turns(PIECE)
        self._looks: list[_Look] = []
        self._containers: list[_Container] = []
        self._turns = _Turns(COMPARED_ELEMENTS)
        self._sized: list[Any] = []
        self._lengths: list[int] = []

    def look_at(self, values: Iterable[tuple[str, object]]) -> None:
        waiting, room = deque(value for value in values if not isinstance(value[1], _IMMUTABLE)), MOST_VALUES
        while waiting and room:
            path, found = waiting.popleft()
            room -= 1
            if isinstance(found, _IMMUTABLE) or id(found) in self._seen:
                continue
            self._seen.add(id(found))
            waiting.extend(islice(self._looked_at(path, found), max(1, room - len(waiting))))

    @property
    def exist(self) -> bool:
        return bool(self._tensors or self._looks or self._containers or self._cells.items)

    def put_back_scratch(self) -> list[str]:
        """Take out again what a lane has only added: entries of a cache, and values of a graph that is used up."""
        if not self._sized or list(map(len, self._sized)) == self._lengths:
            return []
        return [container.change.name for container in self._containers if container.put_back_scratch()]

    def change(self, *, whole: bool = False) -> Change | None:
        """The first value that has changed; large ones are compared piece by piece unless all of them are asked for."""
        if [tensor._version for _, tensor in self._tensors] != self._versions:
            written = zip(self._tensors, self._versions, strict=True)
            return next(Change(name, "a tensor") for (name, t), version in written if t._version != version)
        if list(map(len, self._sized)) != self._lengths:
            longer = zip(self._containers, self._lengths, strict=True)
            return next(container.change for container, length in longer if len(container.value) != length)
        for look in self._looks:
            if not look.is_unchanged():
                return look.change
        return self._turns.change(whole) or self._cells.change(whole)

    def _looked_at(self, path: str, value: Any) -> Iterator[tuple[str, object]]:
        """Keep what a value is, and give what is in it."""
        if isinstance(value, torch.Tensor):
            self._add_tensor(path, value)
        elif isinstance(value, torch.nn.Module):
            self.modules.append((path, value))
            inside = *value._parameters.items(), *value._buffers.items(), *value._modules.items()
            yield from ((f"{path}.{name}", inner) for name, inner in (*inside, *own_attributes(value)))
        elif isinstance(value, numpy.ndarray):
            self._add_array(path, value)
        elif generator_state(value) is not None:
            self._looks.append(_Look(Change(path, "a random generator"), partial(generator_state, value)))
        elif _position(value) is not None:
            self._looks.append(_Look(Change(path, "an iterator"), partial(_position, value)))
        elif isinstance(value, tuple):
            yield from ((f"{path}[{index}]", element) for index, element in enumerate(value[:MOST_ELEMENTS]))
        elif isinstance(value, dict | list | deque | set | bytearray):
            self._add_container(Change(path, f"a {type(value).__name__}"), value)
            if len(value) <= MOST_ELEMENTS and not isinstance(value, bytearray):
                elements = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{path}[{key!r}]", element) for key, element in elements)
        elif _is_of_the_users_own_class(value):
            self._add_container(Change(path, f"of type {type(value).__name__}"), vars(value))
            yield from ((f"{path}.{name}", inner) for name, inner in list(vars(value).items()))

    def _add_container(self, change: Change, value: Any) -> None:
        container = _Container(change, value)
        self._containers.append(container)
        self._turns.items.append(container)
        self._sized.append(value)
        self._lengths.append(len(value))

    def _add_tensor(self, path: str, tensor: torch.Tensor) -> None:
        if is_lazy(tensor):
            self._looks.append(_Look(Change(path, "a lazy parameter"), partial(is_lazy, tensor)))
            return
        if tensor.is_inference() or tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        if tensor.untyped_storage().data_ptr() in self._state:
            # A second name for something of the model, which the model's own rules hold for.
            return
        self._tensors.append((path, tensor))
        self._versions.append(tensor._version)
        content = self._device.host_view(tensor)
        if content is not None:
            self._cells.items += _cells(Change(path, "a tensor"), content, tensor)

    def _add_array(self, path: str, array: numpy.ndarray[Any, Any]) -> None:
        is_data = isinstance(array, numpy.memmap) or array.dtype.hasobject
        if array.flags.writeable and array.flags.c_contiguous and array.size and not is_data:
            self._cells.items += _cells(Change(path, "an array"), array.reshape(-1).view(numpy.uint8).data, None)


class _Turns:
    """Goes round all items, each time over as many as `budget` allows: however many there are, a step costs no more."""

    def __init__(self, budget: int) -> None:
        self.items: list[_Look | _Container] = []
        self._budget = budget
        self._next = 0

    def change(self, whole: bool) -> Change | None:
        left = self._budget
        for _ in range(len(self.items)):
            if left <= 0 and not whole:
                break
            item = self.items[self._next]
            self._next = (self._next + 1) % len(self.items)
            left -= item.cost
            if not item.is_unchanged(whole):
                return item.change
        return None


class _Look:
    """Something that is known by what a function tells of it, such as the state of a random generator."""

    def __init__(self, change: Change, look: Callable[[], Any], cost: int = 0) -> None:
        self.change, self._look, self.cost = change, look, cost
        self._saved = look()

    def is_unchanged(self, whole: bool = True) -> bool:  # noqa: ARG002
        return bool(self._look() == self._saved)


def _cells(change: Change, content: memoryview, tensor: torch.Tensor | None) -> Iterator[_Look]:
    """The bytes of a tensor or an array in pieces."""
    pieces = -(-len(content) // PIECE)
    stride = max(1, -(-pieces * PIECE // MOST_BYTES))
    for piece in range(0, pieces, stride):
        part = content[piece * PIECE : (piece + 1) * PIECE]
        yield _Look(change, partial(_bits, part, tensor), max(len(part), PIECE // 32))


def _bits(content: memoryview, tensor: torch.Tensor | None) -> tuple[int, int]:
    # `.data = ...` gives a tensor other memory, without raising its version.
    return 0 if tensor is None else tensor.data_ptr(), xxhash.xxh3_64_intdigest(content)


class _Container:
    """A list, dict, set or the attributes of an object, with what was in it."""

    def __init__(self, change: Change, value: Any) -> None:
        self.change, self.value = change, value
        self._saved: Any = _copied(value)
        self._start = 0
        self.cost = 8 + min(len(value), MOST_ELEMENTS)

    def is_unchanged(self, whole: bool) -> bool:
        """Whether what is in it is the same; its length is."""
        value, saved = self.value, self._saved
        if len(saved) > MOST_ELEMENTS and not whole:
            return self._is_piece_unchanged()
        if isinstance(value, dict):
            return all(map(is_, value, saved)) and all(map(is_, value.values(), saved.values()))
        return bool(value == saved) if isinstance(value, set | bytearray) else all(map(is_, value, saved))

    def _is_piece_unchanged(self) -> bool:
        if not isinstance(self.value, list):
            return True
        start = self._start
        self._start = start + MOST_ELEMENTS if start + MOST_ELEMENTS < len(self._saved) else 0
        return all(map(is_, self.value[start : start + MOST_ELEMENTS], self._saved[start : start + MOST_ELEMENTS]))

    def put_back_scratch(self) -> bool:
        """Whether there was something that was only added, which is gone now."""
        value, saved = self.value, self._saved
        if len(value) <= len(saved):
            return False
        if type(value) in _MEMORY:
            is_scratch = all(map(is_, saved, value)) and all(map(is_, saved.values(), value.values()))
        elif isinstance(value, list):
            added = value[len(saved) :]
            is_scratch = all(map(is_, saved, value)) and all(_is_of_a_graph(element) for element in added)
        else:
            return False
        if is_scratch:
            value.clear()
            value.update(saved) if isinstance(value, dict) else value.extend(saved)
        return is_scratch


def own_attributes(module: torch.nn.Module) -> list[tuple[str, object]]:
    """What a module keeps besides parameters, buffers and submodules, but for what is internal to torch."""
    kept = [(name, value) for name, value in vars(module).items() if name not in MODULES_OWN]
    return [(name, value) for name, value in kept if not is_internal(module, name)]


def is_internal(module: torch.nn.Module, name: str) -> bool:
    """Whether torch keeps an attribute for itself: of a user's subclass, what the code of torch's own classes names."""
    bases = type(module).__mro__
    torchs = tuple(base for base in bases if base.__module__.partition(".")[0] in ("torch", "builtins", "typing"))
    return name.startswith("_") and (len(torchs) == len(bases) or name in _named_in(torchs))


@cache
def _named_in(kinds: tuple[type, ...]) -> frozenset[str]:
    methods = [method for kind in kinds for method in vars(kind).values() if isinstance(method, FunctionType)]
    return frozenset(name for method in methods for name in method.__code__.co_names)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return frozenset(value) if isinstance(value, set) else bytes(value) if isinstance(value, bytearray) else [*value]


def _is_of_a_graph(value: object) -> bool:
    """Whether a lane can have no use for it that another has made; in an evaluation there are no graphs to tell by."""
    return isinstance(value, torch.Tensor) and (value.grad_fn is not None or not torch.is_grad_enabled())


def _is_of_the_users_own_class(value: object) -> bool:
    """Whether it is an object of a class that was not installed; what samples are read from is no state."""
    kind = type(value)
    if not hasattr(value, "__dict__") or isinstance(value, type) or callable(getattr(kind, "__get__", None)):
        return False
    if hasattr(kind, "__getitem__") or isinstance(value, torch.optim.Optimizer):
        return False
    return is_users_own(kind)


def is_users_own(kind: type) -> bool:
    """Whether a class was not installed with some package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not is_installed(file))


def generator_state(value: object) -> Any:
    """What a random generator will draw next; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    return value.getstate() if isinstance(value, random.Random) else None


def _position(value: object) -> Any:
    """How far an iterator has come, as far as Python tells; None for anything else."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return "exhausted"
        plain = {name: inner for name, inner in frame.f_locals.items() if isinstance(inner, _IMMUTABLE)}
        return frame.f_lasti, plain
    if not isinstance(value, Iterator) or type(value).__module__ not in ("builtins", "itertools"):
        return None
    try:
        with warnings.catch_warnings():
            # From Python 3.12 on those of itertools say that they will not be pickled from 3.14 on. Then most of them
            # cannot be watched any more, but a count tells by its representation how far it has come.
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = value.__reduce__()
    except TypeError:  # a file, say
        return repr(value) if isinstance(value, itertools.count) else None
    return _flat_position(reduced)


def _flat_position(part: object) -> Any:
    """What an iterator is made up of: numbers as they are, other iterators by how far they have come, the rest by
    which it is."""
    if isinstance(part, tuple):
        return tuple(_flat_position(inner) for inner in part)
    if isinstance(part, _IMMUTABLE):
        return part
    position = _position(part)
    return id(part) if position is None else position
