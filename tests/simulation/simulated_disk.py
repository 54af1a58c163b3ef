"""What simulated workers save to and restore from: a disk in memory, that loses what is not synced when its host dies.

The checkpointer, its saves and its retention are the real ones; so is what a checkpoint holds, but for the tensors,
which tell a digest instead of weights.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.memory_store import MemoryAttempt, MemoryStore
from quorate.checkpoint.listing import CheckpointInfo, checkpoint_name
from quorate.checkpoint.manifest import Boxes, Manifest, Part
from quorate.checkpoint.store import Loaded
from quorate.checkpoint.tensor_file import Arena, TensorFile, tensors_in
from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.core.errors import CheckpointError
from quorate.core.generation import Cursor, Generation
from quorate.replica.state_layout import Gather, HeldState, Parts, Replicated
from quorate.storage.atomic import Buffer
from quorate.task.progress import Progress
from simulation.invariants import Referee, Watched
from simulation.task import BEGINNING, Holding

WEIGHTS, MOMENTUM = "weights", "momentum"
"""Two tensors, so that two workers write a part each."""


class SimulatedDisk(MemoryStore):
    """The folder of checkpoints, as all workers of a job share it."""

    def __init__(self, referee: Referee) -> None:
        super().__init__()
        self._referee = referee
        self._spoilt: set[str] = set()

    def spoil_newest(self) -> Cursor | None:
        """The newest checkpoint cannot be read any more, if there is another: without any the job has to fail."""
        whole = self._whole()
        if len(whole) < 2:
            return None
        self._spoilt.add(whole[-1].path.name)
        return whole[-1].cursor

    def lose_unsynced(self) -> None:
        """The host has died: a part whose write had not returned is gone, and so is every attempt with it."""
        self.cut_power()

    def newest_whole(self) -> CheckpointInfo | None:
        whole = self._whole()
        return whole[-1] if whole else None

    def restore(self, path: Path) -> Holding | None:
        """What a process begins with that was given this checkpoint: that, or the newest if it is gone by now."""
        info = next((info for info in self._whole() if info.path == path), None) or self.newest_whole()
        return None if info is None else held_in(self.load(info).encoded)

    def restore_at(self, cursor: Cursor) -> Holding | None:
        """What a process takes up that is to go back to a checkpoint; without any, what it has built."""
        if cursor == BEGINNING.cursor:
            return BEGINNING
        info = next((info for info in self._whole() if info.cursor == cursor), None)
        return None if info is None else held_in(self.load(info).encoded)

    def commit_for(
        self, writer: Watched, attempt: str, manifest: Manifest, check: Callable[[], None]
    ) -> CheckpointInfo:
        """As the folder does: one that is damaged is replaced, and who is late by a generation is refused."""
        name = checkpoint_name(manifest.cursor)
        if name in self._spoilt:
            self._spoilt.discard(name)
            del self.committed[name]
        newest = max((found.generation or (0, 0) for found, _ in self.committed.values()), default=(0, 0))
        is_new = name not in self.committed
        if is_new and manifest.generation is not None and manifest.generation < newest:
            raise CheckpointError("a later generation has committed one since")
        info = self.commit(attempt, manifest, check)
        if is_new:
            self._referee.committed(writer, held_in(self.load(info).encoded))
        return info

    def remove_for(self, writer: Watched, path: Path) -> None:
        """Remove a checkpoint."""
        cursor = self.committed[path.name][0].cursor if path.name in self.committed else None
        self.remove(path)
        self._spoilt.discard(path.name)
        if cursor is not None:
            self._referee.removed(writer, cursor)

    def _whole(self) -> list[CheckpointInfo]:
        return [info for info in self.list() if info.path.name not in self._spoilt]


@dataclass(frozen=True)
class WorkerDisk:
    """The disk as one worker has it: `pause` is what a write takes, in which the worker can die."""

    disk: SimulatedDisk
    writer: Watched
    pause: Callable[[], None]

    def list(self) -> tuple[CheckpointInfo, ...]:
        return self.disk.list()

    def open(self, cursor: Cursor, needed: int = 0, name: str = "") -> "WorkerAttempt":
        return WorkerAttempt(self.disk.open(cursor, needed, name), self.pause)

    def commit(self, attempt: str, manifest: Manifest, check: Callable[[], None]) -> CheckpointInfo:
        self.pause()  # the manifest is written, and the folder synced
        return self.disk.commit_for(self.writer, attempt, manifest, check)

    def remove(self, path: Path) -> None:
        self.disk.remove_for(self.writer, path)
        self.pause()

    def load(self, info: CheckpointInfo, boxes: Boxes | None = None) -> Loaded:
        return self.disk.load(info, boxes)


@dataclass(frozen=True)
class WorkerAttempt:
    """A part is there when its write has returned, and not before."""

    inner: MemoryAttempt
    pause: Callable[[], None]

    @property
    def name(self) -> str:
        return self.inner.name

    def write(self, index: int, parts: int, chunks: Iterable[Buffer]) -> Part:
        self.inner.written()
        pieces = [bytes(chunk) for chunk in chunks]
        self.pause()
        return self.inner.write(index, parts, pieces)

    def written(self) -> Mapping[int, Part]:
        return self.inner.written()

    def vouch(self, position: int, voucher: bytes) -> None:
        self.inner.vouch(position, voucher)

    def vouchers(self) -> Mapping[int, bytes]:
        return self.inner.vouchers()

    def sweep(self) -> None:
        self.inner.sweep()

    def give_up(self) -> None:
        self.inner.give_up()


class SimulatedArena(Arena):
    """Memory that there is always enough of: the real one looks through all that the machine says of its own."""

    def stage(self, file: TensorFile) -> tuple[memoryview, dict[str, torch.Tensor]] | None:
        content = memoryview(bytearray().join(file.chunks()))
        return content, tensors_in(content)


@dataclass(frozen=True)
class HeldLayout:
    """The state layout of a simulated worker: every worker holds all of it."""

    holding: Callable[[], Holding]
    boxes = None

    def state(self, progress: Progress) -> HeldState:
        holding = self.holding()
        content = torch.frombuffer(bytearray(holding.digest.encode()), dtype=torch.uint8)
        tensors = {WEIGHTS: content, MOMENTUM: content.clone()}
        encoded = encode({"replica": {"tensors": tensors}, "progress": progress.to_dict()})
        return HeldState(encoded, dict(tensors), frozenset({WEIGHTS}))

    def parts(self, held: HeldState, writers: int) -> Parts:
        return Replicated.parts(self, held, writers)  # type: ignore[arg-type]  # it looks at what is held alone

    def load(self, encoded: Encoded) -> Progress:
        return Progress(held_in(encoded).cursor)

    def donors(self, generation: Generation) -> Mapping[int, int]:
        return {generation.position(worker): generation.donor for worker in generation.behind}

    def weights_digest(self, gather: Gather) -> str:
        return self.holding().digest


def held_in(encoded: Encoded) -> Holding:
    """What a checkpoint holds; all of its tensors tell the same."""
    state = decode(encoded.skeleton, encoded.tensors)
    weights, momentum = (bytes(state["replica"]["tensors"][name].tolist()).decode() for name in (WEIGHTS, MOMENTUM))
    cursor = Progress.from_dict(state["progress"]).cursor
    return Holding(cursor, weights if weights == momentum else f"{weights} torn from {momentum}")
