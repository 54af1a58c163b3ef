"""Workers that only save: real checkpointers and replicas in one process, whose links are a barrier between threads."""

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import gang
from bits.bit_tasks import Adam
from command import await_condition
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.retention import Retention
from quorate.checkpoint.store import CheckpointFolder
from quorate.checkpoint.tree import encode
from quorate.core.digests import weights_digest
from quorate.core.errors import PeerLost
from quorate.observe.event import Event
from quorate.replica.device import digests, same_bits
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Replicated
from quorate.spec.job import CheckpointSpec, EvaluateSpec
from quorate.task.progress import Progress
from quorate.task.task import Task, configure
from quorate.training.checkpointer import Checkpointer
from quorate.training.lane import LaneResult
from quorate.training.save import OngoingSave, SaveContext
from quorate.training.strategy import Agreement, StepRequest

Given = TypeVar("Given")

PATIENCE = 100.0
JOB: dict[str, Any] = {"seed": 11}


class Table:
    """Where a generation of workers meets: everybody puts something on it, and everybody takes all of it."""

    def __init__(self, seats: int) -> None:
        self._barrier = threading.Barrier(seats, timeout=PATIENCE)
        self._given: list[bytes] = [b""] * seats

    def share(self, seat: int, payload: bytes) -> tuple[bytes, ...]:
        self._given[seat] = payload
        try:
            self._barrier.wait()
            told = tuple(self._given)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("somebody", "has left the table") from None
        return told

    def break_up(self) -> None:
        """Whoever waits here waits in vain."""
        self._barrier.abort()


class Seat:
    """A worker's place at a table: the strategy of a worker that does not train."""

    def __init__(self, table: Table, position: int, worker: int) -> None:
        self.table = table
        self.worker = worker
        self.hosted = range(position, position + 1)
        self.leads = position == 0

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        return self.table.share(self.hosted.start, payload)

    def begin(self, step: int) -> None:
        raise AssertionError("nobody trains here")

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        raise AssertionError("nobody trains here")

    def close(self) -> None:
        self.table.break_up()


class Hand:
    """One worker: its replica, its checkpointer, and what it has told."""

    def __init__(self, number: int, folder: Path, task: type[Task], **rules: Any) -> None:
        spec = gang.job(task)
        self.number = number
        self.replica = Replica(configure(task, spec.params, "test", spec.seed), spec)
        self.events: list[Event] = []
        self.clock: Callable[[], float] = time.monotonic
        self.check_lease: Callable[[], None] = gang.no_trouble
        self.check_commit: Callable[[], None] = gang.no_trouble
        self.tell_all: Callable[[], None] = gang.no_trouble
        checked = CheckpointSpec.model_validate({"every": 1, "keep": 10, "when_busy": "skip"} | rules)
        retention = Retention(checked.keep, checked.keep_every)
        self.folder = CheckpointFolder(folder)
        self.context = SaveContext(
            self.folder,
            retention,
            self.events.append,
            lambda: self.check_commit(),
            lambda: self.tell_all(),
            clock=lambda: self.clock(),
        )
        layout = Replicated(self.replica)
        self.checkpointer = Checkpointer(
            self.context, layout, checked, JOB, {"torch": "2"}, check_lease=lambda: self.check_lease()
        )
        self.seat = Seat(Table(1), 0, number)
        self.train(1)

    def train(self, step: int) -> None:
        """Change everything that a step changes, alike in every replica."""
        generator = torch.Generator().manual_seed(step)
        for _, parameter in self.replica.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.replica.optimizers.update()

    @property
    def saving(self) -> OngoingSave:
        latest = self.checkpointer._latest
        assert latest is not None
        return latest

    def keep(self, last: int) -> None:
        """From now on only so many checkpoints stay."""
        self.checkpointer.context = replace(self.context, retention=Retention(last))

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class Crew:
    """Some workers of one job; after each other they sit at several tables."""

    def __init__(self, folder: Path, workers: int, task: type[Task] = Adam, **rules: Any) -> None:
        self.folder = CheckpointFolder(folder)
        self.hands = [Hand(number, folder, task, **rules) for number in range(workers)]
        self.task, self._rules = task, rules
        self.sit(self.hands)

    def sit(self, hands: Sequence[Hand]) -> None:
        """A generation begins, of these, in this order."""
        table = Table(len(hands))
        for position, hand in enumerate(hands):
            hand.seat = Seat(table, position, hand.number)
        self.present = list(hands)

    def newcomer(self) -> Hand:
        """Somebody in the place of one that is gone, with the others' state."""
        hand = Hand(len(self.hands), self.folder.folder, self.task, **self._rules)
        hand.replica.load(copy.deepcopy(self.present[0].replica.state()))
        return hand

    @property
    def first(self) -> Hand:
        """The one that hosts lane 0."""
        return self.present[0]

    def do(self, act: Callable[[Hand], Given]) -> list[Given]:
        """Everybody who is present does this, at the same time; the first error of anybody is raised here."""
        with ThreadPoolExecutor(len(self.present)) as threads:
            futures = [threads.submit(act, hand) for hand in self.present]
            return [future.result(PATIENCE) for future in futures]

    def first_to_fail(self, act: Callable[[Hand], object]) -> None:
        """The same; but when the first fails, the others find nobody at the table any more."""

        def leave_if_it_fails(hand: Hand) -> None:
            try:
                act(hand)
            except PeerLost:
                pass
            except BaseException:
                hand.seat.close()
                raise

        self.do(leave_if_it_fails)

    def enter(self, step: int) -> None:
        self.do(lambda hand: hand.checkpointer.enter(hand.seat, step))

    def leave(self) -> None:
        self.do(lambda hand: hand.checkpointer.leave())

    def begin(self, progress: Progress) -> None:
        self.do(lambda hand: hand.checkpointer.begin(progress, hand.seat))

    def settle(self, step: int) -> None:
        self.do(lambda hand: hand.checkpointer.settle())

    def save(self, progress: Progress) -> None:
        self.do(lambda hand: hand.checkpointer.save(progress, hand.seat))

    def train(self, step: int) -> None:
        self.do(lambda hand: hand.train(step))

    def await_done(self) -> None:
        """Until nobody saves any more."""
        for hand in self.present:
            if hand.checkpointer._latest is not None:
                assert hand.checkpointer._latest.done.wait(PATIENCE), "a save does not come to an end"

    def save_in_background(self, progress: Progress) -> None:
        """Begin, go on, and wait for the end."""
        self.begin(progress)
        self.settle(progress.cursor.step + 1)
        self.await_done()

    @property
    def wants(self) -> list[bool]:
        """Who asks for a save, though no step does and no time has come."""
        return [hand.checkpointer.is_wanted(by_time=False) for hand in self.present]

    def names(self) -> list[str]:
        """All that lies in the folder."""
        return sorted(entry.name for entry in self.folder.folder.iterdir()) if self.folder.folder.is_dir() else []

    def steps(self) -> list[int]:
        return [info.cursor.step for info in self.folder.list()]

    def whole(self, step: int) -> CheckpointInfo:
        """The checkpoint of a step, which has to be there and whole; nothing else but checkpoints is there."""
        (info,) = (info for info in self.folder.list() if info.cursor.step == step)
        self.folder.verify(info)
        assert not [name for name in self.names() if name.startswith(".")]
        return info


def state_of(hand: Hand, progress: Progress) -> dict[str, Any]:
    """What a checkpoint has to give back, in memory of its own."""
    return copy.deepcopy({"replica": hand.replica.state(), "progress": progress.to_dict()})


def assert_loads(folder: CheckpointFolder, info: CheckpointInfo, expected: dict[str, Any]) -> None:
    """A checkpoint gives back this state, bit for bit."""
    found, wanted = encode(folder.load(info).state), encode(expected)
    assert found.skeleton == wanted.skeleton
    assert found.tensors.keys() == wanted.tensors.keys()
    assert [name for name, tensor in found.tensors.items() if not same_bits(tensor, wanted.tensors[name])] == []
    assert info.manifest.weights_digest == weights_digest(digests(expected["replica"]["tensors"].items()))


def at(step: int) -> Progress:
    """A job that has come so far."""
    progress = Progress()
    for _ in range(step):
        progress = progress.after_step(8)
    return progress


def best_at(step: int) -> Progress:
    """The same, and its evaluation is the best so far."""
    return at(step).after_evaluation({"loss": 0.5}, EvaluateSpec(), None)


class Gate:
    """Holds whoever comes here until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE), "nobody has opened the gate"

    def open(self) -> None:
        self._open.set()


@contextmanager
def opened_in_the_end(*gates: Gate) -> Iterator[None]:
    """Threads must not be left behind gates by a test that fails."""
    try:
        yield
    finally:
        for gate in gates:
            gate.open()


def await_true(what: str, condition: Callable[[], bool]) -> None:
    await_condition(what, condition, PATIENCE)
