"""The parts that all scripts of the checkpoint benchmark share: the floor of the disk, loads, and the peers' loop."""

import math
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.cases import endless, loader_of, loss_of, optimizer_of, sized_case
from benchmarks.disk import files_in, forget, read_raw, write_raw
from benchmarks.memory import MemoryWatch, peak_memory
from benchmarks.saves import Costs, Floor, Loads, Save, save_readings
from benchmarks.told import answer, read_order

REPEATS = 3
"""Raw writes before a training and after it, and loads of each kind."""

SETTLED = 3
"""Steps after which a training has all the memory that it takes without saves."""

BATCHES = 4
"""In an epoch: what they hold does not matter, and memory is measured."""

FEWEST_STEPS = 20
STEP = 0.1
ROOM = 3
"""From one save to the next there is time for so many raw writes, with steps of this many seconds or more."""

_PIECE = 1 << 20

State = dict[str, Any]


class Way(Protocol):
    """One way to save a state."""

    def begin(self, state: State, path: Path) -> None:
        """Save it; returns when the loop may compute."""
        ...

    def settle(self) -> None:
        """Returns when the state may change: what is being saved has been copied."""
        ...

    @property
    def committed(self) -> float | None:
        """The moment at which the newest save was durable; none as long as it is not."""
        ...

    def load(self, state: State, path: Path) -> object:
        """Load a save; a way that needs a state of the same shape to load into is given one."""
        ...

    def close(self) -> None:
        """Nothing of it runs when this returns."""
        ...


@dataclass(frozen=True)
class Trained:
    """What came of a training: when each step ended, its saves, and the memory that the first of them took."""

    moments: list[float]
    saves: list[Save]
    extra_memory: int

    @property
    def counted(self) -> list[Save]:
        """All but the first, during which the memory was watched."""
        return self.saves[1:]

    @property
    def costs(self) -> Costs:
        """Of those that count."""
        if not self.counted:
            raise SystemExit(f"only {len(self.saves)} saves came about: the disk is too slow for this many steps")
        return Costs.of([moment for moment in self.moments if moment >= self.saves[0].ended], self.counted)


def measure_training(
    size: int, folder: Path, train: Callable[[int], Trained], load: Callable[[], tuple[Path, Callable[[], object]]]
) -> list[dict[str, Any]]:
    """The readings of one script: the floor before, the training with a save every so many steps, the floor, loads.

    `load` gives what was saved last, and how it is loaded.
    """
    writes = raw_writes(folder, size)
    trained = train(steps_between_saves(statistics.median(writes)))
    path, loading = load()
    loads, reads, reads_again = timed_loads(path, loading)
    writes += raw_writes(folder, size)
    floor = Floor(writes, reads, reads_again)
    return save_readings(size, trained.costs, trained.counted, loads, floor, trained.extra_memory / size)


def steps_between_saves(raw: float) -> int:
    """Enough that a save has ended long before the next one, and leaves steps that it does not disturb."""
    return max(FEWEST_STEPS, math.ceil(ROOM * raw / STEP))


def total_steps(every: int, saves: int) -> int:
    """One save more than those that count, and undisturbed steps after the last."""
    return every * (saves + 2)


def raw_writes(folder: Path, size: int) -> list[float]:
    """Seconds of each, from memory as large as the state."""
    piece = os.urandom(_PIECE)
    content = memoryview(bytearray(size))
    for start in range(0, size, _PIECE):
        content[start : start + _PIECE] = piece[: size - start]
    return [write_raw(folder, content) for _ in range(REPEATS)]


def timed_loads(path: Path, load: Callable[[], object]) -> tuple[Loads, list[float], list[float]]:
    """Loads from the disk and from the page cache, each beside a raw read of the same files: their times, by turns."""
    load()  # what is imported for it is not to be timed
    files = files_in(path)
    loads, reads, loads_again, reads_again = [], [], [], []
    for _ in range(REPEATS):
        forget(files)
        reads.append(read_raw(files))
        forget(files)
        loads.append(_seconds(load))
    for _ in range(REPEATS):
        reads_again.append(read_raw(files))
        loads_again.append(_seconds(load))
    return Loads(loads, loads_again), reads, reads_again


def measure_saves(way: Way) -> None:
    """Answer the launcher with what this way of saving costs a hand-written loop, on one thread."""
    order = read_order()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size, saves = order["size"], order["saves"]
    with tempfile.TemporaryDirectory(dir=order["folder"]) as temporary:
        folder = Path(temporary)
        loop = SavingLoop(way, size, folder)
        try:
            answer(*measure_training(size, folder, lambda every: loop.train(every, saves), loop.last_save))
        finally:
            way.close()


class SavingLoop:
    """The loop that everybody writes first, with a save now and then."""

    def __init__(self, way: Way, size: int, folder: Path) -> None:
        self._way = way
        self._size = size
        self._folder = folder
        self._model: nn.Module
        self._optimizer: torch.optim.Optimizer
        self._moments: list[float] = []
        self._saves: list[Save] = []
        self._path = folder
        self._pending: float | None = None
        self._waited = 0.0

    def train(self, every: int, saves: int) -> Trained:
        """All steps, and all saves but one at the end that nothing would follow."""
        case = sized_case(self._size)
        self._model = case.build()
        self._optimizer = optimizer_of(self._model)
        batches = endless(loader_of(case, BATCHES * case.batch_size))
        watch = MemoryWatch(over=lambda: bool(self._saves), clock=perf_counter)
        watch.start()
        try:
            for step in range(1, total_steps(every, saves) + 1):
                self._step(next(batches))
                if step % every == 0 and len(self._saves) <= saves:
                    self._save(step)
            self._note_commit()
        finally:
            watch.stop()
        first = self._saves[0]
        calm = peak_memory(watch.samples, self._moments[SETTLED - 1], self._moments[every - 2])
        peak = peak_memory(watch.samples, first.began, first.ended)
        return Trained(self._moments, self._saves, max(0, peak - calm))

    def last_save(self) -> tuple[Path, Callable[[], object]]:
        """Where it is, and how it is loaded."""
        return self._path, lambda: self._way.load(self._state(), self._path)

    def _state(self) -> State:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _step(self, batch: list[torch.Tensor]) -> None:
        self._optimizer.zero_grad()
        loss = loss_of(self._model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._waited += _seconds(self._way.settle)
        self._optimizer.step()
        loss.item()
        self._note_commit()
        self._moments.append(perf_counter())

    def _save(self, step: int) -> None:
        if self._pending is not None:
            raise SystemExit(f"the save before step {step} was still running when the next one was due")
        self._path, self._pending = self._folder / f"step-{step}", self._moments[-1]
        self._waited = _seconds(lambda: self._way.begin(self._state(), self._path))

    def _note_commit(self) -> None:
        ended = self._way.committed
        if self._pending is not None and ended is not None:
            self._saves.append(Save(self._pending, ended, ended - self._pending, self._waited))
            self._pending = None


def _seconds(call: Callable[[], object]) -> float:
    """How long a call takes; what it gives is let go of afterwards."""
    began = perf_counter()
    result = call()
    seconds = perf_counter() - began
    del result
    return seconds
