"""Which operations of a record make the storages that are wanted, and in which order.

Random numbers are drawn in the order of the record, since each depends on those before it. Everything else is done when
it is first needed: in the order of the record, all of `Model().to(torch.bfloat16)` would be in memory before the first
tensor is converted. What is overwritten before anybody reads it is not computed, or, if it is drawn, drawn into memory
that is free again at once: that is what becomes of a layer's first weights under `self.apply(init)`.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol


class Recorded(Protocol):
    """What a plan knows of an operation. Storages are numbers."""

    @property
    def inputs(self) -> frozenset[int]:
        """Whose values it reads."""

    @property
    def writes(self) -> frozenset[int]:
        """Those that it makes or changes."""

    @property
    def overwrites(self) -> frozenset[int]:
        """Those of `writes` that keep nothing of what was there."""

    @property
    def draw(self) -> Any:
        """None if it draws no random numbers."""


class Step(NamedTuple):
    """An operation of a plan, and the storages that are done and no longer needed after it."""

    number: int
    is_dropped: bool  # it is done for the sake of later draws only
    done: list[int]
    freed: list[int]


class Plan:
    """Which operations make the storages that are wanted, and in which order."""

    def __init__(self, operations: Sequence[Recorded], wanted: Collection[int], *, all_draws: bool) -> None:
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
