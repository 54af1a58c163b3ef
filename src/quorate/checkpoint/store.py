"""A folder of checkpoints, in which every checkpoint that is listed can be loaded, whenever the writer died."""

import contextlib
import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from quorate.checkpoint.listing import CheckpointInfo, Search, Skipped, look_at, survey
from quorate.checkpoint.manifest import Manifest, Part
from quorate.checkpoint.name import checkpoint_name
from quorate.checkpoint.retention import surplus
from quorate.checkpoint.verification import MANIFEST, read_manifest, verify_part
from quorate.core.cursor import Cursor, Phase
from quorate.core.errors import CheckpointError
from quorate.storage.atomic import Buffer, discard, move_into_place, sync_folder, write_new_file

log = logging.getLogger(__name__)

TENSORS = "state.safetensors"
WRITING = ".writing-"
REMOVING = ".removing-"


@dataclass(frozen=True)
class Saved:
    """What a save has cost."""

    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """A state that was verified before it was decoded, on the CPU."""

    manifest: Manifest
    state: dict[str, Any]


class CheckpointFolder:
    """Saves, lists, verifies, loads and removes checkpoints. It has one writer at a time, and any number of readers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: set[Path] = set()

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        phase: int,
        weights_digest: str,
        job: dict[str, Any],
        environment: dict[str, Any],
        metrics: dict[str, Any],
        check: Callable[[], None] = lambda: None,
    ) -> Saved:
        """Write a checkpoint; when this returns it is on the disk, under its final name.

        `check` raises if the writer may not commit any more: it is asked last, when all is written. The same state
        saved again is left as it is. A damaged checkpoint of the same cursor is replaced.
        """
        # Here, because a launcher that only lists and verifies must not wait for torch.
        from quorate.checkpoint.tensor_file import TensorFile
        from quorate.checkpoint.tree import encode

        started = time.perf_counter()
        final = self.folder / checkpoint_name(Cursor(step, Phase(phase)))
        present = self._present(final)
        if present is not None:
            _refuse_another_state(present, weights_digest)
            return Saved(final, present.bytes, time.perf_counter() - started)
        encoded = encode(state)
        content = TensorFile(encoded.tensors)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(step, phase, created, (), encoded.skeleton, weights_digest, job, environment, metrics)
        with self._explaining(final, content.size):
            size = self._write(final, manifest, content.chunks(), check)
        self._written.add(final)
        return Saved(final, size, time.perf_counter() - started)

    def list(self) -> tuple[CheckpointInfo, ...]:
        """All checkpoints that have a sound manifest, newest last."""
        return tuple(info for info in survey(self.folder) if isinstance(info, CheckpointInfo))

    def verify(self, info: CheckpointInfo) -> None:
        """Read a checkpoint through and raise `CheckpointError` with what is wrong with it, if anything is."""
        for part in read_manifest(info.path).parts:
            verify_part(info.path, part)

    def search(self) -> Search:
        """The newest whole checkpoint, and what had to be skipped to find it."""
        skipped: list[Skipped] = []
        for found in reversed(survey(self.folder)):
            checked = self._checked(found)
            if isinstance(checked, CheckpointInfo):
                return Search(checked, tuple(skipped))
            skipped.append(checked)
        return Search(None, tuple(skipped))

    def newest_whole(self) -> CheckpointInfo | None:
        """The newest checkpoint that is whole; `search` also tells which newer ones are not."""
        return self.search().newest

    def load(self, info: CheckpointInfo) -> Loaded:
        """Verify a checkpoint and decode its state."""
        from quorate.checkpoint.tensor_file import read_tensors
        from quorate.checkpoint.tree import decode

        self.verify(info)
        manifest = read_manifest(info.path)
        tensors: dict[str, Any] = {}
        for part in manifest.parts:
            tensors |= read_tensors(info.path / part.file)
        return Loaded(manifest, decode(manifest.skeleton, tensors))

    def prune(
        self, keep: int, best: int | None = None, check: Callable[[], None] = lambda: None
    ) -> tuple[CheckpointInfo, ...]:
        """Remove all but the last `keep` and those of step `best`, never the only whole one; returns the removed.

        `check` raises if nothing may be removed any more.
        """
        infos = {info.cursor: info for info in self.list()}
        whole = next((cursor for cursor in sorted(infos, reverse=True) if self._is_whole(infos[cursor])), None)
        removed = []
        for cursor in surplus(list(infos), keep, best, whole):
            check()
            try:
                self.remove(infos[cursor])
                removed.append(infos[cursor])
            except CheckpointError as error:
                # One that cannot be removed must not keep the others, nor end the job.
                log.warning("%s", error)
        return tuple(removed)

    def remove(self, info: CheckpointInfo) -> None:
        """Remove a checkpoint: first from the list, in one move, then from the disk."""
        try:
            self._set_aside(info.path)
        except OSError as error:
            raise CheckpointError(f"cannot remove checkpoint {info.path}: {error.strerror}") from error

    def _checked(self, found: CheckpointInfo | Skipped) -> CheckpointInfo | Skipped:
        if isinstance(found, Skipped):
            return found
        try:
            self.verify(found)
        except CheckpointError as error:
            return Skipped.of(found.path, error)
        return found

    def _is_whole(self, info: CheckpointInfo) -> bool:
        # What this process wrote it need not read again: retention runs after every save.
        return info.path in self._written or isinstance(self._checked(info), CheckpointInfo)

    def _present(self, final: Path) -> CheckpointInfo | None:
        """The whole checkpoint that is there already, if there is one."""
        found = self._checked(look_at(final))
        return found if isinstance(found, CheckpointInfo) else None

    def _write(self, final: Path, manifest: Manifest, chunks: Iterator[Buffer], check: Callable[[], None]) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        temporary = self._temporary(WRITING, final)
        try:
            temporary.mkdir()
            part = _write_part(temporary, chunks)
            text = replace(manifest, parts=(part,)).to_json()
            write_new_file(temporary / MANIFEST, [text.encode()])
            sync_folder(temporary)
            check()
            if final.exists():
                self._set_aside(final)
            move_into_place(temporary, final)
        except BaseException:
            discard(temporary)
            raise
        return part.bytes

    def _sweep(self) -> None:
        """Remove what a writer that died has left: it is no checkpoint, and it takes space."""
        for entry in self.folder.iterdir():
            if entry.name.startswith((WRITING, REMOVING)):
                discard(entry)

    def _set_aside(self, path: Path) -> None:
        doomed = self._temporary(REMOVING, path)
        move_into_place(path, doomed)
        self._written.discard(path)
        discard(doomed)

    def _temporary(self, purpose: str, final: Path) -> Path:
        return self.folder / f"{purpose}{final.name}-{secrets.token_hex(4)}"

    @contextlib.contextmanager
    def _explaining(self, final: Path, needed: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = _free(self.folder)
            space = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "Free some space, lower `checkpoint.keep`," if space else "Make the folder writable,"
            raise CheckpointError(
                f"cannot save checkpoint {final.name} in {self.folder}: {error.strerror or error}; "
                f"it needs {needed:,} bytes and {free} are free. {remedy} or choose another folder with `runs`."
            ) from error


def _write_part(folder: Path, chunks: Iterator[Buffer]) -> Part:
    digest = xxhash.xxh3_128()

    def digested() -> Iterator[Buffer]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    size = write_new_file(folder / TENSORS, digested())
    return Part(TENSORS, size, digest.hexdigest())


def _refuse_another_state(present: CheckpointInfo, weights_digest: str) -> None:
    if present.manifest.weights_digest != weights_digest:
        raise CheckpointError(
            f"checkpoint {present.path} is whole and has other weights ({present.manifest.weights_digest}) "
            f"than those to be saved ({weights_digest}); one run cannot pass through both. "
            "Move it away, or start a new run."
        )


def _free(folder: Path) -> str:
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    try:
        return f"{shutil.disk_usage(existing or os.sep).free:,}"
    except OSError:
        return "an unknown number of"
