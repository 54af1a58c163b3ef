"""A record of what is done to tensors on the meta device, and its replay on the CPU.

It speaks of storages, the memory behind tensors. A view, a `Parameter` or a `.data` is only another look at a storage
and needs no replay: an argument is recorded as its storage, with size, strides and offset.
"""

import hashlib
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from quorate.core.errors import UnsupportedModelError
from quorate.core.user_code import is_installed

META, CPU = torch.device("meta"), torch.device("cpu")
_ATEN = torch.ops.aten
# They write each element of their first argument and read none.
_FILLS = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"}
_FILLS |= {"geometric_", "bernoulli_"}
# Arguments that are written to, though their declaration does not say so: the running mean and variance.
_WRITTEN = {"native_batch_norm": ("running_mean", "running_var")}
# While a build is recorded, generators are seeded with numbers from here on instead of being drawn from.
_MARKS = 0x7EED << 48

State = Tensor | int | None
"""Where a generator is: in this state, where it was after the draw of that number, or where its last draw left it."""


class CannotDefer(UnsupportedModelError):  # noqa: N818 (a finding, not a mistake)
    """A model that can only be built whole."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"model() cannot be built in parts: {why}. Quorate records what model() does to its tensors and does it "
            "later, for one tensor after the other, so nothing may depend on values that torch has drawn. Compute such "
            "values with NumPy or Python, and give trained weights in initial_weights()."
        )


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a look at a storage, which has a number."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: UntypedStorage) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=CPU)
        return tensor.set_(storage, self.offset, self.size, self.stride)

    def is_like(self, tensor: Tensor) -> bool:
        strides = zip(self.size, self.stride, tensor.stride(), strict=False)
        return (self.dtype, self.size, self.offset) == (tensor.dtype, tensor.size(), tensor.storage_offset()) and all(
            size < 2 or stride == other for size, stride, other in strides
        )


class Touched(NamedTuple):
    """The storages whose values a call reads, those that it changes, and those of these that keep nothing."""

    inputs: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]


class Draw(NamedTuple):
    """A generator that an operation draws from, and where it is then."""

    generator: torch.Generator
    state: State


@dataclass(frozen=True, slots=True)
class Operation:
    """A call, with a `View` in place of each recorded tensor. A real tensor in it is a constant."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype  # the default one, at the time
    draw: Draw | None
    created: dict[int, View]  # of new storages, by the position in what is returned
    inputs: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]  # those of `writes` that keep nothing of what was there


class TensorRecord:
    """Operations in the order in which they were called."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._storages: list[UntypedStorage] = []  # kept, so that no other gets the address of one
        self._numbers: dict[int, int] = {}
        self._marks: dict[bytes, int] = {}
        self._last_draw: dict[torch.Generator, int] = {}
        self._restored: dict[int, Tensor | None] = {}

    def view(self, tensor: Tensor) -> View:
        _check_kind(tensor)
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            raise CannotDefer(f"it has a tensor on the meta device that was not made in it{where()}")
        return View(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def constant(self, tensor: Tensor) -> Tensor:
        """A recorded tensor with the values that a real one has now."""
        made: Tensor = self.run(_ATEN.clone.default, (tensor.detach(),), {})
        return made

    def value(self, tensor: Tensor, why: str) -> Tensor:
        """The values that a recorded tensor has now, computed for whoever cannot do without: no random numbers."""
        if not tensor.is_meta:
            return tensor
        view = self.view(tensor)
        made: list[Tensor] = []
        plan = Plan(self._operations, {view.storage}, all_draws=False)
        drawn = next((step.number for step in plan.steps if self._operations[step.number].draw), None)
        if drawn is not None:
            raise CannotDefer(f"{why} reads a value that depends on {self._operations[drawn].call}{where()}")
        self._perform(plan, lambda _, storage: made.append(view.of(storage)))
        return made[0]

    def replay(self, wanted: Collection[int], done: Callable[[int, UntypedStorage], None]) -> None:
        """Make the storages that are wanted, each handed over as soon as it has the values it had at the end."""
        self._perform(Plan(self._operations, wanted, all_draws=True), done)

    def run(self, call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it with tensors on the meta device, and record it if it makes or changes any."""
        if torch.Tag.inplace_view in call.tags:
            return call(*args, **kwargs)
        touched = self._touched(call, args, kwargs)
        recorded = tree_map_only(Tensor, self._recorded, (args, kwargs))
        leaves = tree_leaves((args, kwargs))
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(META), (args, kwargs))
        args, kwargs = tree_map_only(torch.Generator, lambda _: None, (args, kwargs))
        is_factory = not any(isinstance(leaf, Tensor) for leaf in leaves)
        if "device" in kwargs or (is_factory and any(a.name == "device" for a in call._schema.arguments)):
            recorded[1]["device"], kwargs["device"] = CPU, META
        draws = torch.Tag.nondeterministic_seeded in call.tags
        # Without the call where nothing can go wrong: torch imports its compiler for normal_() on the meta device.
        returned = args[0] if draws and call.overloadpacket.__name__ in _FILLS else call(*args, **kwargs)
        created = dict(self._created(returned))
        if created or touched.writes:
            self._add(call, recorded[0], recorded[1], touched, created, draws)
        return returned

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._numbers

    def fill(self, call: Callable[..., Any], tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Record a call that draws all values of a recorded tensor anew, as one operation."""
        view = self.view(tensor)
        writes = frozenset([view.storage])
        touched = Touched(frozenset(), writes, writes if _covers_storage(tensor) else frozenset())
        self._add(call, (view, *args), kwargs, touched, {}, True)
        return tensor

    def _add(
        self,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        touched: Touched,
        created: dict[int, View],
        draws: bool,
    ) -> None:
        generators = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
        draw = self._draw(next(generators, torch.default_generator)) if draws else None
        dtype, new = torch.get_default_dtype(), frozenset(view.storage for view in created.values())
        writes, overwrites = touched.writes | new, touched.overwrites | new
        self._operations.append(Operation(call, args, kwargs, dtype, draw, created, touched.inputs, writes, overwrites))

    def _recorded(self, tensor: Tensor) -> View | Tensor:
        # Copied: the build may change it afterwards, and NumPy without a trace.
        return self.view(tensor) if tensor.is_meta else tensor.detach().clone()

    def _touched(self, call: OpOverload, args: Any, kwargs: Any) -> Touched:
        inputs, writes, overwrites = set(), set(), set()
        for position, argument in enumerate(call._schema.arguments):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                is_written |= argument.name in _WRITTEN.get(call.overloadpacket.__name__, ())
                if not tensor.is_meta:
                    if is_written:
                        raise CannotDefer(f"{call} changes a tensor made from other data, such as an array{where()}")
                    continue
                number = self.view(tensor).storage
                is_filled = is_written and (argument.is_out or call.overloadpacket.__name__ in _FILLS)
                if is_written:
                    writes.add(number)
                if is_filled and _covers_storage(tensor):
                    overwrites.add(number)
                if not is_filled:
                    inputs.add(number)
        return Touched(frozenset(inputs), frozenset(writes), frozenset(overwrites - inputs))

    def _created(self, returned: Any) -> Iterator[tuple[int, View]]:
        for position, tensor in enumerate(tree_leaves(returned)):
            if isinstance(tensor, Tensor):
                _check_kind(tensor)
                storage = tensor.untyped_storage()
                if storage._cdata not in self._numbers:
                    self._numbers[storage._cdata] = len(self._storages)
                    self._storages.append(storage)
                    yield position, self.view(tensor)

    def state_of(self, generator: torch.Generator) -> State:
        """Where a generator is at this point of the record."""
        mark = self._marks.get(_digest(generator))
        if mark is None:
            return generator.get_state()
        if mark == self._last_draw.get(generator):
            return None
        self._restored[mark] = None
        return mark

    def set_state(self, generator: torch.Generator, state: State) -> None:
        """Put it there, in a replay."""
        if state is not None:
            generator.set_state(state if isinstance(state, Tensor) else self._restored[state])  # type: ignore[arg-type]

    def _draw(self, generator: torch.Generator) -> Draw:
        """The build may keep the state of a generator and restore it: so after each draw it is in one of its own."""
        draw = Draw(generator, self.state_of(generator))
        number = len(self._operations)
        generator.manual_seed(_MARKS + number)
        self._marks[_digest(generator)] = self._last_draw[generator] = number
        return draw

    def _perform(self, plan: "Plan", done: Callable[[int, UntypedStorage], None]) -> None:
        default = torch.get_default_dtype()
        storages: dict[int, UntypedStorage] = {}
        try:
            for step in plan.steps:
                operation = self._operations[step.number]
                torch.set_default_dtype(operation.dtype)
                with torch.no_grad():
                    self._repeat(step, {n: storages[n] for n in operation.inputs} if step.is_dropped else storages)
                for number in step.done:
                    done(number, storages[number])
                for number in step.freed:
                    del storages[number]
        finally:
            torch.set_default_dtype(default)

    def _repeat(self, step: "Step", storages: dict[int, UntypedStorage]) -> None:
        operation = self._operations[step.number]

        def real(view: View) -> Tensor:
            nbytes = self._storages[view.storage].nbytes()
            storage = storages.setdefault(view.storage, UntypedStorage(0))  # type: ignore[no-untyped-call]
            if storage.nbytes() < nbytes:
                storage.resize_(nbytes)
            return view.of(storage)

        args, kwargs = tree_map_only(View, real, (operation.args, operation.kwargs))
        if operation.draw is not None:
            self.set_state(*operation.draw)
        returned = tree_leaves(operation.call(*args, **kwargs))
        if operation.draw is not None and step.number in self._restored:
            self._restored[step.number] = operation.draw.generator.get_state()
        for position, view in operation.created.items():
            if not view.is_like(returned[position]):
                raise CannotDefer(
                    f"{operation.call} gives a tensor of another layout on the CPU than on the meta device"
                )
            storages[view.storage] = returned[position].untyped_storage()


def _check_kind(tensor: Tensor) -> None:
    is_wrapped: bool = is_traceable_wrapper_subclass(tensor)
    if is_wrapped or tensor.layout is not torch.strided or tensor.is_conj():
        raise CannotDefer(f"a {type(tensor).__name__} of layout {tensor.layout} cannot be recorded{where()}")


def _covers_storage(tensor: Tensor) -> bool:
    """Whether each byte of its storage belongs to one element of the tensor."""
    if tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _digest(generator: torch.Generator) -> bytes:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=16).digest()


def where(error: BaseException | None = None) -> str:
    """The place in the user's code: " (at model.py:12)". Nothing if none of it is running."""
    of_error = [] if error is None else [*traceback.walk_tb(error.__traceback__)]
    for frame, line in reversed(of_error) if of_error else traceback.walk_stack(sys._getframe()):
        if not is_installed(frame.f_code.co_filename):
            return f" (at {Path(frame.f_code.co_filename).name}:{line})"
    return ""


class Step(NamedTuple):
    """An operation of a plan, and the storages that are done and no longer needed after it."""

    number: int
    is_dropped: bool  # it is done for the sake of later draws only
    done: list[int]
    freed: list[int]


class Plan:
    """Which operations make the storages that are wanted, and in which order.

    Random numbers are drawn in the order of the record, since each depends on those before it. Everything else is done
    when it is first needed: in the order of the record, all of `Model().to(torch.bfloat16)` would be in memory before
    the first tensor is converted. What is overwritten before anybody reads it is not computed, or, if it is drawn,
    drawn into memory that is free again at once: that is what becomes of a layer's first weights under
    `self.apply(init)`.
    """

    def __init__(self, operations: Sequence[Operation], wanted: Collection[int], *, all_draws: bool) -> None:
        self._operations = operations
        self._dropped: set[int] = set()
        needed = self._needed(wanted, all_draws)
        before, last_write = self._dependencies(needed)
        last = {number: last_write[number] for number in wanted}
        self.steps = self._steps(self._order(needed, before, last.values()), last)

    def _needed(self, wanted: Collection[int], all_draws: bool) -> list[int]:
        """Backwards, since only what comes later says whether anybody reads what an operation writes."""
        needed, live = [], set(wanted)
        for number in range(len(self._operations) - 1, -1, -1):
            operation = self._operations[number]
            if not live.isdisjoint(operation.writes):
                live |= operation.writes
                live -= operation.overwrites
            elif all_draws and operation.draw is not None:
                if operation.inputs.isdisjoint(operation.writes):
                    self._dropped.add(number)
            else:
                continue
            live |= operation.inputs
            needed.append(number)
        return needed[::-1]

    def _dependencies(self, needed: list[int]) -> tuple[dict[int, set[int]], dict[int, int]]:
        """For each operation those that must come before it; for each storage the last one that writes to it."""
        before: dict[int, set[int]] = {}
        last_write: dict[int, int] = {}
        readers: dict[int, list[int]] = defaultdict(list)
        for number in needed:
            operation = self._operations[number]
            writes = self._writes(number)
            before[number] = {last_write[s] for s in operation.inputs | writes if s in last_write}
            before[number].update(reader for s in writes for reader in readers.pop(s, ()))
            for storage in operation.inputs:
                readers[storage].append(number)
            last_write |= dict.fromkeys(writes, number)
        return before, last_write

    def _order(self, needed: list[int], before: dict[int, set[int]], last: Collection[int]) -> list[int]:
        """Draws in their order. After each, whatever is wanted and waits for no further draw; before, what it needs."""
        after: dict[int, int] = {}
        for number in needed:
            earlier = max((after[other] for other in before[number]), default=-1)
            after[number] = earlier if self._operations[number].draw is None else number
        order: list[int] = []
        seen: set[int] = set()
        draws = {number for number in needed if self._operations[number].draw is not None}
        for root in sorted({*draws, *last}, key=lambda number: (after[number], number)):
            group, pending = [], [root]
            while pending:
                number = pending.pop()
                if number not in seen:
                    seen.add(number)
                    group.append(number)
                    pending.extend(before[number])
            order.extend(sorted(group))
        return order

    def _steps(self, order: list[int], last: dict[int, int]) -> list[Step]:
        steps = [Step(number, number in self._dropped, [], []) for number in order]
        last_use: dict[int, Step] = {}
        for step in steps:
            operation, writes = self._operations[step.number], self._writes(step.number)
            # What is overwritten as a whole need not be kept until then.
            for storage in operation.overwrites & writes & last_use.keys():
                last_use[storage].freed.append(storage)
            last_use |= dict.fromkeys(operation.inputs | writes, step)
        for storage, step in last_use.items():
            step.freed.append(storage)
        by_number = {step.number: step for step in steps}
        for storage, number in last.items():
            by_number[number].done.append(storage)
        return steps

    def _writes(self, number: int) -> frozenset[int]:
        return frozenset() if number in self._dropped else self._operations[number].writes
