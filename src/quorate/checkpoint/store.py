"""A folder of checkpoints, in which every checkpoint that is listed can be loaded, whenever the writer died."""

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quorate.checkpoint.attempt import WRITING, Attempt
from quorate.checkpoint.cipher import Cipher
from quorate.checkpoint.digester import DIGESTS
from quorate.checkpoint.key import cipher_of, read_key
from quorate.checkpoint.listing import CheckpointInfo, Search, Skipped, Unusable, look_at, newest_generation, survey
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.name import checkpoint_name
from quorate.checkpoint.part_file import SEALED
from quorate.checkpoint.retention import Retention, surplus
from quorate.checkpoint.verification import MANIFEST, read_manifest, verify_part
from quorate.core.cursor import Cursor
from quorate.core.errors import CheckpointError, UntrustedError
from quorate.core.generation import GenerationId
from quorate.spec.job import CheckpointSpec
from quorate.storage.atomic import discard, move_into_place, sync_folder, write_new_file

log = logging.getLogger(__name__)

REMOVING = ".removing-"


@dataclass(frozen=True)
class Loaded:
    """A state that was verified before it was decoded, on the CPU."""

    manifest: Manifest
    state: dict[str, Any]


class CheckpointFolder:
    """Saves, lists, verifies, loads and removes checkpoints. It has one committer at a time, and any number of readers.

    What is written is digested with `digest`, and encrypted with a cipher. What is read says itself how it was written;
    but where there is a cipher, nothing is taken for a checkpoint that was not written with its key.
    """

    def __init__(self, folder: Path, *, digest: str = DIGESTS[0], cipher: Cipher | None = None) -> None:
        self.folder = folder
        self.digest = digest
        self.cipher = cipher
        self._written: set[Path] = set()

    @classmethod
    def of_job(cls, folder: Path, rules: CheckpointSpec) -> "CheckpointFolder":
        """As a job says it. Raises `CheckpointError` where its key cannot be read; or it has none, and a checkpoint is
        encrypted: one who could edit the job and add a plain checkpoint would otherwise have it used."""
        if rules.encrypt is not None:
            return cls(folder, digest=rules.digest, cipher=read_key(rules.encrypt))
        if (sealed := _encrypted_in(folder)) is not None:
            raise CheckpointError(why_not_plain(str(sealed), folder.parent.name))
        return cls(folder, digest=rules.digest)

    # --- writing

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
    ) -> CheckpointInfo:
        """Write a checkpoint at once, as one part; when this returns it is on the disk, under its final name."""
        # Here, because a launcher that only lists and verifies must not wait for torch.
        from quorate.checkpoint.tensor_file import TensorFile
        from quorate.checkpoint.tree import encode

        encoded = encode(state)
        content = TensorFile(encoded.tensors)
        manifest = Manifest(step, phase, "", (), encoded.skeleton, weights_digest, job, environment, metrics)
        attempt = None
        try:
            attempt = Attempt.begin(self.folder, manifest.cursor)
            self.sweep(attempt)
            attempt.write(0, 1, content.chunks(), digest=self.digest, cipher=self.cipher)
            return self.commit(attempt, manifest, check)
        except OSError as error:
            raise self.explained(error, manifest.cursor, content.size) from error
        finally:
            if attempt is not None:
                attempt.give_up()

    def commit(self, attempt: Attempt, manifest: Manifest, check: Callable[[], None]) -> CheckpointInfo:
        """Make an attempt that has all its parts a checkpoint, in one move.

        `check` raises if the writer may not commit any more: it is asked last, when all is written. Nor may one of an
        older generation than has committed here by now: it was replaced and has not heard of it, on another host say.
        The same state saved again is left as it is. A damaged checkpoint of the same cursor is replaced.
        """
        final = self.folder / checkpoint_name(manifest.cursor)
        present = self._checked(look_at(final))
        if isinstance(present, CheckpointInfo):
            _refuse_another_state(present, manifest.weights_digest)
            attempt.give_up()
            return present
        parts = tuple(part for _, part in sorted(attempt.written().items()))
        whole = replace(manifest, parts=parts, created=datetime.now(UTC).isoformat(timespec="seconds"))
        write_new_file(attempt.path / MANIFEST, [whole.sealed(self.cipher).to_json().encode()])
        sync_folder(attempt.path)
        check()
        _refuse_late(self.folder, manifest)
        if final.exists():
            self._set_aside(final)
        move_into_place(attempt.path, final)
        self._written.add(final)
        return CheckpointInfo(final, whole)

    def sweep(self, current: Attempt) -> None:
        """Remove what a writer that died has left: it is no checkpoint, and it takes space."""
        for entry in self.folder.iterdir():
            if entry.name.startswith(WRITING) and entry != current.path:
                Attempt(entry).give_up()
            elif entry.name.startswith(REMOVING):
                discard(entry)

    def explained(self, error: OSError, cursor: Cursor, needed: int) -> CheckpointError:
        """What it means, and what helps."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "Free some space, lower `checkpoint.keep`, or choose"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "Make the folder writable, or choose"
        else:
            remedy = "Choose"
        return CheckpointError(
            f"cannot save checkpoint {checkpoint_name(cursor)} in {self.folder}: {error.strerror or error}; "
            f"it needs {needed:,} bytes and {_free(self.folder)} are free. {remedy} another folder with `runs`."
        )

    # --- reading

    def list(self) -> tuple[CheckpointInfo, ...]:
        """All checkpoints that have a sound manifest, newest last."""
        return tuple(info for info in survey(self.folder) if isinstance(info, CheckpointInfo))

    def verify(self, info: CheckpointInfo) -> None:
        """Read a checkpoint through and raise `CheckpointError` with what is wrong with it, if anything is."""
        manifest = read_manifest(info.path)
        if self.cipher is not None:
            _check_key(info.path, manifest, self.cipher)
        for part in manifest.parts:
            verify_part(info.path, part)

    def search(self, foreign: Callable[[CheckpointInfo], str] = lambda _: "") -> Search:
        """The newest whole checkpoint, and what had to be skipped to find it.

        None only where there is none: a running job may save and remove while it looks, so it looks until it has found
        one or nothing has changed meanwhile. `foreign` says why a checkpoint is none of the run that it is looked for,
        or nothing.
        """
        while True:
            present = survey(self.folder)
            skipped: list[Skipped] = []
            for found in reversed(present):
                if isinstance(found, CheckpointInfo) and (why := foreign(found)):
                    skipped.append(Skipped(found.path, why, Unusable.FOREIGN))
                    continue
                checked = self._checked(found)
                if isinstance(checked, CheckpointInfo):
                    return Search(checked, tuple(skipped))
                skipped.append(checked)
            if survey(self.folder) == present:
                return Search(None, tuple(skipped))

    def newest_whole(self) -> CheckpointInfo | None:
        """The newest checkpoint that is whole; `search` also tells which newer ones are not."""
        return self.search().newest

    def load(self, info: CheckpointInfo) -> Loaded:
        """Verify a checkpoint and decode its state; each part is read once."""
        from quorate.checkpoint.part_file import read_part
        from quorate.checkpoint.tensor_file import tensors_in
        from quorate.checkpoint.tree import decode

        manifest = read_manifest(info.path)
        cipher = cipher_of(manifest, self.cipher)
        tensors: dict[str, Any] = {}
        for part in manifest.parts:
            tensors |= tensors_in(read_part(info.path, part, cipher))
        return Loaded(manifest, decode(manifest.opened(cipher).skeleton, tensors))

    # --- removing

    def prune(
        self, retention: Retention, best: int | None = None, check: Callable[[], None] = lambda: None
    ) -> tuple[CheckpointInfo, ...]:
        """Remove what retention does not keep, never the only whole one; returns the removed.

        `check` raises if nothing may be removed any more.
        """
        infos = {info.cursor: info for info in self.list()}
        whole = next((cursor for cursor in sorted(infos, reverse=True) if self._is_whole(infos[cursor])), None)
        removed = []
        bests = {cursor: info.best for cursor, info in infos.items()}
        for cursor in surplus(list(infos), retention, best, whole, bests):
            check()
            try:
                self.remove(infos[cursor].path)
                removed.append(infos[cursor])
            except CheckpointError as error:
                # One that cannot be removed must not keep the others, nor end the job.
                log.warning("%s", error)
        return tuple(removed)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, whole or damaged: first from the list, in one move, then from the disk."""
        try:
            self._set_aside(path)
        except OSError as error:
            raise CheckpointError(f"cannot remove checkpoint {path}: {error.strerror}") from error

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

    def _set_aside(self, path: Path) -> None:
        doomed = self.folder / f"{REMOVING}{path.name}-{secrets.token_hex(4)}"
        move_into_place(path, doomed)
        self._written.discard(path)
        discard(doomed)


def why_not_plain(sealed: str, run: str) -> str:
    """Why nothing is read or saved without a key: an encrypted checkpoint is there, and the job names no key."""
    return (
        f"checkpoint {sealed} is encrypted, and the job of run {run} says checkpoint.encrypt: null. Name the key, as "
        "by --set checkpoint.encrypt.key_file=PATH; to go on without one, first decrypt them all: "
        f"quorate checkpoints rekey {run} --decrypt --key-file PATH"
    )


def _encrypted_in(folder: Path) -> Path | None:
    """The newest checkpoint with an encrypted part, or whose manifest says so."""
    found = reversed(survey(folder))
    return next((each.path for each in found if _is_encrypted(each)), None)


def _is_encrypted(found: CheckpointInfo | Skipped) -> bool:
    is_said = isinstance(found, CheckpointInfo) and found.manifest.encryption is not None
    return is_said or any(found.path.glob(f"*{SEALED}"))


def _refuse_late(folder: Path, manifest: Manifest) -> None:
    newest = newest_generation(folder)
    if manifest.generation is not None and manifest.generation < newest:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} is not committed: generation {_named(newest)} has committed one "
            f"since, and its writer is still of generation {_named(manifest.generation)}"
        )


def _named(generation: tuple[int, int]) -> str:
    return str(GenerationId(*generation))


def _check_key(path: Path, manifest: Manifest, cipher: Cipher) -> None:
    try:
        cipher_of(manifest, cipher)
    except UntrustedError as error:
        raise UntrustedError(f"checkpoint {path}: {error}") from None


def _refuse_another_state(present: CheckpointInfo, weights_digest: str) -> None:
    if present.manifest.weights_digest not in ("", weights_digest):
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
