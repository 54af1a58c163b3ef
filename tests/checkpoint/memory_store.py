"""A store of checkpoints in memory, as a simulated disk: what is not committed is lost when the power is cut."""

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from quorate.checkpoint.listing import CheckpointInfo, checkpoint_name
from quorate.checkpoint.manifest import Boxes, Manifest, Part
from quorate.checkpoint.reshard import collected
from quorate.checkpoint.store import Loaded, NoSpace
from quorate.checkpoint.tensor_file import tensors_in
from quorate.checkpoint.tree import Encoded, is_in_pieces
from quorate.core.errors import AttemptGone, CheckpointError
from quorate.core.generation import Cursor
from quorate.storage.atomic import Buffer

ROOT = Path("memory")


class MemoryStore:
    """Any number of threads may use it, as the writers of one job do."""

    def __init__(self) -> None:
        self.free: int | None = None
        self.attempts: dict[str, dict[int, tuple[Part, bytes]]] = {}
        self.committed: dict[str, tuple[Manifest, dict[int, tuple[Part, bytes]]]] = {}
        self.vouchers: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def cut_power(self) -> None:
        """Every writer is dead, and so is what was on its way."""
        with self._lock:
            self.attempts.clear()

    def list(self) -> tuple[CheckpointInfo, ...]:
        with self._lock:
            infos = [CheckpointInfo(ROOT / name, manifest) for name, (manifest, _) in self.committed.items()]
        return tuple(sorted(infos, key=lambda info: info.cursor))

    def open(self, cursor: Cursor, needed: int = 0, name: str = "") -> "MemoryAttempt":
        with self._lock:
            if not name:
                name = f"{checkpoint_name(cursor)}-{next(self._numbers)}"
                self.attempts[name] = {}
        return MemoryAttempt(self, name)

    def commit(self, attempt: str, manifest: Manifest, check: Callable[[], None]) -> CheckpointInfo:
        name = checkpoint_name(manifest.cursor)
        with self._lock:
            if name in self.committed:
                present = self.committed[name][0]
                if present.weights_digest != manifest.weights_digest:
                    weights = f"{present.weights_digest}, {manifest.weights_digest}"
                    raise CheckpointError(f"{weights}: one run cannot pass through both")
                self.attempts.pop(attempt, None)
                return CheckpointInfo(ROOT / name, present)
            parts = self.parts_of(attempt)
            check()
            whole = replace(manifest, parts=tuple(part for _, (part, _) in sorted(parts.items())))
            self.committed[name] = whole, self.attempts.pop(attempt)
        return CheckpointInfo(ROOT / name, whole)

    def remove(self, path: Path) -> None:
        with self._lock:
            if self.committed.pop(path.name, None) is None:
                raise CheckpointError(f"cannot remove checkpoint {path}: it is not there")

    def load(self, info: CheckpointInfo, boxes: Boxes | None = None) -> Loaded:
        with self._lock:
            manifest, parts = self.committed[info.path.name]
        tensors: dict[str, Any] = {}
        for _, content in parts.values():
            tensors |= tensors_in(memoryview(bytearray(content)))
        if boxes is not None or is_in_pieces(manifest.skeleton):
            return Loaded(manifest, collected(manifest.skeleton, tensors.items(), boxes))
        return Loaded(manifest, Encoded(manifest.skeleton, tensors))

    def parts_of(self, attempt: str) -> dict[int, tuple[Part, bytes]]:
        if attempt not in self.attempts:
            raise AttemptGone(f"attempt {attempt} was abandoned by another writer")
        return self.attempts[attempt]


@dataclass(frozen=True)
class MemoryAttempt:
    store: MemoryStore
    name: str

    def write(self, index: int, parts: int, chunks: Iterable[Buffer]) -> Part:
        self.store.parts_of(self.name)
        content = b"".join(bytes(chunk) for chunk in chunks)
        if self.store.free is not None and len(content) > self.store.free:
            raise NoSpace(f"no space: it needs {len(content)} bytes and {self.store.free} are free")
        part = Part(f"{index + 1}-of-{parts}", len(content), f"xxh3-128:{xxhash.xxh3_128(content).hexdigest()}")
        with self.store._lock:
            self.store.parts_of(self.name)[index] = part, content
        return part

    def written(self) -> Mapping[int, Part]:
        with self.store._lock:
            return {index: part for index, (part, _) in self.store.parts_of(self.name).items()}

    def vouch(self, position: int, voucher: bytes) -> None:
        with self.store._lock:
            self.store.parts_of(self.name)
            self.store.vouchers.setdefault(self.name, {})[position] = voucher

    def vouchers(self) -> Mapping[int, bytes]:
        with self.store._lock:
            self.store.parts_of(self.name)
            return dict(self.store.vouchers.get(self.name, {}))

    def sweep(self) -> None:
        with self.store._lock:
            self.store.attempts = {name: found for name, found in self.store.attempts.items() if name == self.name}

    def give_up(self) -> None:
        with self.store._lock:
            self.store.attempts.pop(self.name, None)
