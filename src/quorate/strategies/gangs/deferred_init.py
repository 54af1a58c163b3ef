"""Building a model without memory for its tensors, and then making them one after the other.

A worker that holds a part of a model must begin with the bits that one process begins with, and may not have memory for
all of them. So `model()` runs with every tensor on the meta device, which has shapes and no values, and what it does to
them is recorded. Then the record is replayed on the CPU: the same operations, with the same numbers from the same
generators in the same order, and so with the same bits (`tensor_record`). Each parameter and buffer is handed out when
it is done, and its memory is free again::

    seed_generators(seed)
    plan = deferred(task.model)
    plan.materialize(lambda name, whole: parts.update({name: my_part(whole).clone()}))

Real are only tensors that are made from data which the build has: `torch.from_numpy()`, a constant of the program. What
is computed from these alone is computed at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_any, tree_leaves, tree_map, tree_map_only

from quorate.core.user_code import describe
from quorate.data.streams import preserved_generators
from quorate.strategies.gangs.tensor_record import CPU, META, CannotDefer, TensorRecord, View, where

__all__ = ["CannotDefer", "Deferred", "Keep", "deferred"]

Keep = Callable[[str, Tensor], None]
"""Takes what it wants of a whole tensor, by its name. It must not change the tensor: others may be computed from it."""

_ATEN = torch.ops.aten
_TABLES = ("_parameters", "_buffers", "_modules")
# What the build is told of a recorded tensor: nn.init and load_state_dict() leave those on the meta device as they are.
_PRETENDED = {Tensor.is_meta.__get__: False, Tensor.is_cpu.__get__: True, Tensor.device.__get__: CPU}  # type: ignore[attr-defined]
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
# What torch says of a tensor without values, and NumPy of an array that is a copy of one.
_WITHOUT_VALUES = ("meta", "unallocated", "read-only")


def deferred(build: Callable[[], nn.Module]) -> "Deferred":
    """Run `build`, which gives a model, without making its tensors. Seed the generators first, as for a plain build.

    Where it raises, the generators are as before: the model can still be built whole.
    """
    record = TensorRecord()
    try:
        with preserved_generators(on_error_only=True), _drawn_as_one(record), _Pretence(record), _Recorder(record):
            model = build()
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if not any(word in str(error).lower() for word in _WITHOUT_VALUES):
            raise
        raise CannotDefer(f"it needs the values of a tensor{where(error)}: {describe(error)}") from error
    return Deferred(model, record)


class Deferred:
    """A model all of whose parameters and buffers are on the meta device, and the record of how they are made."""

    def __init__(self, model: nn.Module, record: TensorRecord) -> None:
        self.model = model
        self._record = record
        _swap_real_tensors(model, record)
        self._last_state = record.state_of(torch.default_generator)
        self._names: dict[int, list[tuple[str, View]]] = defaultdict(list)
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if not is_lazy(tensor):
                view = record.view(tensor)
                self._names[view.storage].append((name, view))
        # Now, since the model may be cut into parts before its tensors are made.
        self._attributes = list(self._plain_attributes())

    def materialize(self, keep: Keep) -> None:
        """Make every parameter and buffer, and hand each to `keep`, once, tied ones under their first name.

        The model stays on the meta device, but for tensors that are plain attributes of its modules: these become real.
        Torch's global generator is left as a plain build leaves it.
        """
        plain = {view.storage for *_, value in self._attributes for view in self._views(value)} - self._names.keys()
        made: dict[int, torch.UntypedStorage] = {}

        def done(number: int, storage: torch.UntypedStorage) -> None:
            for name, view in self._names.get(number, ()):
                keep(name, view.of(storage))
            if number in plain:
                made[number] = storage

        self._record.replay({*self._names, *plain}, done)
        self._record.set_state(torch.default_generator, self._last_state)

        def real(tensor: Tensor) -> Tensor:
            view = next(self._views(tensor), None)
            return tensor if view is None or view.storage not in made else view.of(made[view.storage])

        for module, name, value in self._attributes:
            setattr(module, name, tree_map_only(Tensor, real, value))

    def _plain_attributes(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """Module, name and value of what is a tensor, or has some in it, that is no parameter or buffer."""
        for module in self.model.modules():
            for name, value in vars(module).items():
                if name not in _TABLES and any(view.storage not in self._names for view in self._views(value)):
                    yield module, name, value

    def _views(self, value: Any) -> Iterator[View]:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and not is_lazy(leaf) and leaf.is_meta:
                yield self._record.view(leaf)


def _swap_real_tensors(model: nn.Module, record: TensorRecord) -> None:
    """Put those that the build has made from its own data onto the meta device too, with their values in the record."""
    swapped: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or is_lazy(tensor) or tensor.is_meta:
                    continue
                if tensor not in swapped:
                    values = record.constant(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    swapped[tensor] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
                table[name] = swapped[tensor]  # type: ignore[assignment]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch. New tensors are on the meta device, whatever the build asks for."""

    def __init__(self, record: TensorRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing to compile here, and torch's compiler takes seconds to import

    def __torch_dispatch__(
        self, call: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        with torch._C.DisableTorchFunction():  # here a tensor is what it is
            return self._called(call, args, dict(kwargs or {}))

    def _called(self, call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Torch itself asks for the meta device, for a tensor beside a recorded one.
        if torch.device(kwargs.get("device") or CPU).type not in ("cpu", "meta"):
            raise CannotDefer(f"it makes a tensor on the device {kwargs['device']}{where()}")
        if tree_any(lambda leaf: isinstance(leaf, torch.UntypedStorage) and leaf.device == CPU, args):
            raise CannotDefer(f"it loads tensors from a file{where()}")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_real = bool(tensors) and not any(tensor.is_meta for tensor in tensors)
        if is_real and torch.Tag.nondeterministic_seeded not in call.tags:
            return call(*args, **kwargs | ({"device": CPU} if "device" in kwargs else {}))
        if torch.Tag.data_dependent_output in call.tags:
            return self._from_values(call, args, kwargs)
        try:
            return self._record.run(call, args, kwargs)
        except NotImplementedError:  # the shape of what is returned depends on values, or torch has it for CPUs only
            return self._from_values(call, args, kwargs)

    def _from_values(self, call: OpOverload, args: Any, kwargs: Any) -> Any:
        """What a call returns that cannot be done later. Its arguments are made for it."""
        what = "item()" if call is _ATEN._local_scalar_dense.default else str(call)
        if call._schema.is_mutable or torch.Tag.nondeterministic_seeded in call.tags:
            raise CannotDefer(f"{what} cannot be recorded{where()}")
        args, kwargs = tree_map_only(Tensor, lambda tensor: self._record.value(tensor, what), (args, kwargs))
        return tree_map_only(Tensor, self._record.constant, call(*args, **kwargs))


class _Pretence(TorchFunctionMode):
    """Sees what Python asks of a tensor. A recorded one says that it is on the CPU, as it will be."""

    def __init__(self, record: TensorRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == META:
            raise CannotDefer(f"it makes a tensor on the meta device itself{where()}")
        if call is torch.tensor:
            values = call(*args, **kwargs)
            with _disable_current_modes():
                kept = values if values.is_meta else self._record.constant(values)
                return kept.requires_grad_(values.requires_grad)
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            return self._asked(args[0], call, args[1:], kwargs)
        return call(*args, **kwargs)

    def _asked(self, tensor: Tensor, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call in _PRETENDED:
            return _PRETENDED[call]
        if call is Tensor.cpu:
            return tensor
        if call is Tensor.to:
            args, kwargs = tree_map(_without_device, (args, kwargs))
        if call not in _READS:
            return call(tensor, *args, **kwargs)
        with _disable_current_modes():
            values = call(self._record.value(tensor, f"{call.__name__.strip('_')}()"), *args, **kwargs)
        if isinstance(values, numpy.ndarray):
            values.flags.writeable = False  # what is written into it would reach no tensor
        return values


def _without_device(value: Any) -> Any:
    """An argument of `to()` for a tensor that is on the CPU already, and is only copied if it gets another type."""
    if isinstance(value, Tensor):
        return value.dtype
    return None if value in ("cpu", CPU) else value


@contextmanager
def _drawn_as_one(record: TensorRecord) -> Iterator[None]:
    """`trunc_normal_` draws again until all values are within bounds: its record is the call, not what it calls."""
    plain = nn.init._no_grad_trunc_normal_

    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return record.fill(plain, tensor, args, kwargs) if record.holds(tensor) else plain(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = plain
