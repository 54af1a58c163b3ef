"""The numbers of a run's steps as columns: a million steps take as much memory as a million numbers each do."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from quorate.history.step_rows import FILL, MISSING, STEP, StepRows


class StepColumns:
    """All steps that a run has told. A run that went on from a checkpoint tells some again: the last telling counts."""

    def __init__(self, rows: StepRows) -> None:
        self._rows = rows
        told = self._told(STEP).astype(np.int64)
        self._order: NDArray[np.int64] | slice = slice(None)
        self.steps = told
        """In order, each once."""
        if not np.all(np.diff(told) > 0):
            order = np.argsort(told, kind="stable")
            in_order = told[order]
            last = np.append(in_order[1:] != in_order[:-1], True)
            self._order, self.steps = order[last], in_order[last]

    def column(self, name: str) -> NDArray[np.float64]:
        """A number for each of the steps."""
        return self._told(name)[self._order]

    def series(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The steps that have a finite number in a column, and that number."""
        numbers = self.column(name)
        finite = np.isfinite(numbers)
        return (self.steps, numbers) if finite.all() else (self.steps[finite], numbers[finite])

    def family(self, name: str) -> Iterator[str]:
        """The columns of a family of numbers: one of its name, or one for each optimizer."""
        return (each for each in self._rows.names if each.partition(".")[0] == name)

    def _told(self, name: str) -> NDArray[np.float64]:
        """In the order in which the steps were told."""
        fill = FILL.get(name, MISSING)
        parts = []
        for packed in self._rows.packed:
            part = packed.part(name)
            parts.append(np.full(packed.count, fill) if part is None else np.frombuffer(part, np.float64))
        rows = self._rows.rows
        if rows.count:
            column = rows.columns.get(name)
            parts.append(np.full(rows.count, fill) if column is None else np.array(column, np.float64))
        return np.concatenate(parts) if parts else np.empty(0)
