"""Where a job's checkpoints lie: what the checkpointer asks of such a place, and a folder, in which every checkpoint
that is listed can be loaded, whenever a writer died."""

import errno
import logging
import os
import secrets
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from quorate.checkpoint.listing import (
    REMOVING,
    WRITING,
    CheckpointInfo,
    Search,
    Skipped,
    Unusable,
    checkpoint_name,
    look_at,
    newest_generation,
    read_manifest,
    shown_by,
    survey,
)
from quorate.checkpoint.manifest import MANIFEST, Boxes, Manifest, Part, Seal
from quorate.checkpoint.part_file import DIGESTS, SEALED, parts_in, verify_part, write_part
from quorate.checkpoint.retention import Retention, surplus
from quorate.core.cached import cached_property
from quorate.core.errors import AttemptGone, CheckpointError, UntrustedError
from quorate.core.generation import Cursor, GenerationId
from quorate.core.regular_file import read_regular
from quorate.spec.job import CheckpointSpec
from quorate.storage.atomic import Buffer, discard, move_into_place, sync_folder, write_atomically, write_new_file

log = logging.getLogger(__name__)

VOUCHER = "voucher-"
DISTRUSTED = ".distrusted-"
"""How the name of a checkpoint begins that is not to be used any more."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class NoSpace(CheckpointError):  # noqa: N818
    """There is no room for a checkpoint."""


@dataclass(frozen=True)
class Loaded:
    """A state that was verified, on the CPU; `encoded` is a `tree.Encoded`, which who only lists need not import."""

    manifest: Manifest
    encoded: Any

    @cached_property
    def state(self) -> dict[str, Any]:
        """The tree that was saved."""
        from quorate.checkpoint.tree import decode

        return dict(decode(self.encoded.skeleton, self.encoded.tensors))


class Attempt(Protocol):
    """A checkpoint on its way. Every writer adds its part, from a thread of its own, until one of them commits it.

    Whoever fails gives it up, and so tells all: from then on, and after a commit, `write` and `written` raise
    `AttemptGone`. Trouble with the place is a `CheckpointError`, which says what helps, or `NoSpace`.

    Others take part by its `name`. When `write` returns, a part of so many is there to stay, and has been read through;
    `written` are those that are there, whole, by index. With `vouch` a writer says what state it has, besides the part
    that it writes: all must have the same. `sweep` removes what other attempts have left, of writers that died: for the
    one that commits, when no other runs. `give_up` gives the space back, but of one that was committed.
    """

    @property
    def name(self) -> str: ...

    def write(self, index: int, parts: int, chunks: Iterable[Buffer]) -> Part: ...

    def written(self) -> Mapping[int, Part]: ...

    def vouch(self, position: int, voucher: bytes) -> None: ...

    def vouchers(self) -> Mapping[int, bytes]: ...

    def sweep(self) -> None: ...

    def give_up(self) -> None: ...


class CheckpointStore(Protocol):
    """Called by the checkpointers of all workers of a job, and by whoever goes on from what they have saved.

    A checkpoint is listed from its commit on, whole, whatever dies; nothing else is ever listed. `list` has the newest
    last. `open` begins a checkpoint, for which this worker will write so many bytes as are `needed`; or, with its name,
    takes part in one that another worker has begun. `commit` makes an attempt that has all its parts a checkpoint, in
    one move; `check` raises if the writer may not commit any more: it is asked last, when all is written. `load`
    verifies what it reads; of tensors that `boxes` cuts it has only what that wants.
    """

    def list(self) -> tuple[CheckpointInfo, ...]: ...

    def open(self, cursor: Cursor, needed: int = 0, name: str = "") -> Attempt: ...

    def commit(self, attempt: str, manifest: Manifest, check: Callable[[], None]) -> CheckpointInfo: ...

    def remove(self, path: Path) -> None: ...

    def load(self, info: CheckpointInfo, boxes: Boxes | None = None) -> Loaded: ...


def remove_surplus(
    store: CheckpointStore,
    retention: Retention,
    best: int | None,
    newest_whole: Cursor | None,
    *,
    check: Callable[[], None] = lambda: None,
    coming: Cursor | None = None,
) -> tuple[CheckpointInfo, ...]:
    """Remove what retention does not keep, never the only one that is known to be whole; returns the removed.

    `check` raises if nothing may be removed any more. With `coming`, what will be too much once that one is saved.
    """
    infos = {info.manifest.cursor: info for info in store.list()}
    if newest_whole not in infos:
        return ()
    bests = {cursor: info.best for cursor, info in infos.items()}
    removed: list[CheckpointInfo] = []
    for cursor in surplus(list(infos), retention, best, newest_whole, bests, coming):
        check()
        try:
            store.remove(infos[cursor].path)
            removed.append(infos[cursor])
        except CheckpointError as error:
            # One that cannot be removed must not keep the others, nor end the job.
            log.warning("%s", error)
    return tuple(removed)


@dataclass(frozen=True)
class FolderAttempt:
    """A hidden folder, which becomes the checkpoint. A part gets its name in it when it is whole."""

    path: Path
    cursor: Cursor
    needed: int
    digest: str
    cipher: Seal | None

    @property
    def name(self) -> str:
        return self.path.name

    def write(self, index: int, parts: int, chunks: Iterable[Buffer]) -> Part:
        with self.present():
            return write_part(self.path, f"{index + 1}-of-{parts}", chunks, digest=self.digest, cipher=self.cipher)

    def written(self) -> dict[int, Part]:
        with self.present():
            return parts_in(self.path)

    def vouch(self, position: int, voucher: bytes) -> None:
        with self.present():
            # It tells the names of tensors and the settings of optimizers: no more in plain than in a checkpoint.
            sealed = voucher if self.cipher is None else b64encode(b"".join(self.cipher.seal([voucher])))
            write_atomically(self.path / f"{VOUCHER}{position}", sealed.decode())

    def vouchers(self) -> dict[int, bytes]:
        with self.present():
            paths = {int(path.name.removeprefix(VOUCHER)): path for path in self.path.glob(f"{VOUCHER}*")}
            found = {position: read_regular(path) for position, path in paths.items()}
            if (cipher := self.cipher) is None:
                return found
            return {position: bytes(cipher.open(b64decode(sealed))) for position, sealed in found.items()}

    def sweep(self) -> None:
        with self.present():
            for entry in self.path.parent.iterdir():
                if entry.name.startswith(WRITING) and entry != self.path:
                    replace(self, path=entry).give_up()
                elif entry.name.startswith(REMOVING):
                    discard(entry)

    def give_up(self) -> None:
        if not self.path.is_dir():
            return
        # In one move, as it is committed: removed file by file it could become a checkpoint that lacks some.
        doomed = self.path.with_name(f"{self.name}-{secrets.token_hex(4)}-void")
        try:
            os.rename(self.path, doomed)  # noqa: PTH104 (one seam for every call that changes the disk)
        except FileNotFoundError:
            return
        except OSError:
            doomed = self.path
        discard(doomed)

    @contextmanager
    def present(self) -> Iterator[None]:
        """For what is done in its folder: raise `AttemptGone` where that is not there, or goes meanwhile."""
        gone = AttemptGone(f"attempt {self.path.name} was abandoned by another writer")
        try:
            if not self.path.is_dir():
                raise gone
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self.path.is_dir():
                raise gone from None
            raise explained(error, self.path.parent, self.cursor, self.needed) from error


class CheckpointFolder:
    """A folder of checkpoints, on this disk or one that all workers share. It has one committer at a time, and any
    number of readers.

    What is written is digested with `digest`, and encrypted with a cipher. What is read says itself how it was written;
    but where there is a cipher, nothing is taken for a checkpoint that was not written with its key.
    """

    def __init__(self, folder: Path, *, digest: str = DIGESTS[0], cipher: Seal | None = None) -> None:
        self.folder = folder
        self.digest = digest
        self.cipher = cipher

    @classmethod
    def at(cls, folder: Path, *, digest: str = DIGESTS[0], cipher: Seal | None = None) -> "CheckpointFolder":
        """The checkpoints of a run: in its folder, or in the store that the folder shows."""
        kind = cls if shown_by(folder) is None else resolve_name("quorate.stores.stored_run:StoredCheckpoints")
        opened = kind(folder, digest=digest, cipher=cipher)
        assert isinstance(opened, CheckpointFolder)
        return opened

    @classmethod
    def of_job(cls, folder: Path, rules: CheckpointSpec) -> "CheckpointFolder":
        """As a job says it. Raises `CheckpointError` where its key cannot be read; or it has none, and a checkpoint is
        encrypted: one who could edit the job and add a plain checkpoint would otherwise have it used."""
        if rules.sealing is not None:
            cipher = resolve_name(rules.sealing.opened_by)(rules.sealing)
            return cls.at(folder, digest=rules.digest, cipher=cipher)
        if (sealed := _encrypted_in(folder)) is not None:
            raise CheckpointError(why_not_plain(str(sealed), folder.parent.name))
        return cls.at(folder, digest=rules.digest)

    # --- writing

    def open(self, cursor: Cursor, needed: int = 0, name: str = "") -> Attempt:
        path = self.folder / (name or new_name(cursor))
        if not name:
            try:
                self.folder.mkdir(exist_ok=True)  # not its parents: a run that was renamed is not begun again
                path.mkdir()
            except OSError as error:
                raise explained(error, self.folder, cursor, needed) from error
        return FolderAttempt(path, cursor, needed, self.digest, self.cipher)

    def commit(self, attempt: str, manifest: Manifest, check: Callable[[], None]) -> CheckpointInfo:
        """Make a checkpoint of an attempt, of which the caller has seen that all parts are there. Refused where `check`
        raises, and of an older generation than has committed here. One of the same state stays; a damaged one goes."""
        final = self.folder / checkpoint_name(manifest.cursor)
        source = FolderAttempt(self.folder / attempt, manifest.cursor, 0, self.digest, self.cipher)
        if final.exists() and (present := self._present(final, manifest)):
            source.give_up()
            return present
        whole, written = self._completed(manifest, source)
        source = replace(source, needed=sum(part.bytes for part in whole.parts))
        with source.present():
            for voucher in source.path.glob(f"{VOUCHER}*"):
                voucher.unlink(missing_ok=True)
            try:
                write_new_file(source.path / MANIFEST, [written])
                sync_folder(source.path)
                check()
                self._refuse_older(manifest)
                if final.exists():
                    self._set_aside(final)
                move_into_place(source.path, final)  # from here on it is a checkpoint; nothing lists an attempt
            except BaseException:
                # It may be tried again, once this writer may commit.
                (source.path / MANIFEST).unlink(missing_ok=True)
                raise
        return CheckpointInfo(final, whole)

    def _present(self, final: Path, manifest: Manifest) -> CheckpointInfo | None:
        """The whole checkpoint that is there already; refused where it is of another state."""
        if not isinstance(present := self._checked(look_at(final)), CheckpointInfo):
            return None
        _refuse_another_state(present, manifest)
        return present

    def _completed(self, manifest: Manifest, attempt: Attempt) -> tuple[Manifest, bytes]:
        """The manifest of an attempt that has all its parts, and the same as it is written."""
        parts = tuple(attempt.written().values())
        whole = replace(manifest, parts=parts, created=datetime.now(UTC).isoformat(timespec="seconds"))
        return whole, (whole if self.cipher is None else whole.sealed(self.cipher)).to_json().encode()

    def _refuse_older(self, manifest: Manifest) -> None:
        newest = newest_generation(self.folder)
        if manifest.generation is not None and manifest.generation < newest:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} is not committed: generation {GenerationId(*newest)} "
                "has committed one since, and its writer is still of generation "
                f"{GenerationId(*manifest.generation)}"
            )

    # --- reading

    def list(self) -> tuple[CheckpointInfo, ...]:
        return tuple(info for info in survey(self.folder) if isinstance(info, CheckpointInfo))

    def verify(self, info: CheckpointInfo) -> None:
        """Read a checkpoint through and raise `CheckpointError` with what is wrong with it, if anything is."""
        manifest = read_manifest(info.path)
        if self.cipher is not None:
            try:
                cipher_of(manifest, self.cipher)
            except UntrustedError as error:
                raise UntrustedError(f"checkpoint {info.path}: {error}") from None
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

    def load(self, info: CheckpointInfo, boxes: Boxes | None = None) -> Loaded:
        from quorate.checkpoint.part_file import read_part
        from quorate.checkpoint.tensor_file import tensors_in
        from quorate.checkpoint.tree import Encoded, is_in_pieces

        manifest = read_manifest(info.path)
        cipher = cipher_of(manifest, self.cipher)
        skeleton = manifest.opened(cipher).skeleton
        if boxes is not None or is_in_pieces(skeleton):
            from quorate.checkpoint.reshard import collected, read_tensors

            stream = (read_tensors(info.path, part, cipher) for part in manifest.parts)
            return Loaded(manifest, collected(skeleton, chain.from_iterable(stream), boxes))
        tensors: dict[str, Any] = {}
        for part in manifest.parts:
            tensors |= tensors_in(read_part(info.path, part, cipher))
        return Loaded(manifest, Encoded(skeleton, tensors))

    # --- removing

    def remove(self, path: Path) -> None:
        try:
            self._set_aside(path)
        except OSError as error:
            raise CheckpointError(f"cannot remove checkpoint {path}: {error.strerror}") from error

    def set_aside(self, after: int) -> None:
        """Take everything that was saved after this step off the list; several workers may do so at once. A folder
        keeps it under another name, a store its manifest. Raises `CheckpointError` where one stays on the list."""
        for info in self.list():
            if info.cursor.step <= after:
                continue
            log.warning("checkpoint %s is set aside: what it holds may be wrong", info.path.name)
            aside = f"{DISTRUSTED}{info.path.name}-{secrets.token_hex(4)}"
            try:
                self._keep_aside(info, aside)
            except (OSError, CheckpointError) as error:
                if any(one.path == info.path for one in self.list()):  # otherwise another worker was faster
                    raise CheckpointError(
                        f"cannot set aside checkpoint {info.path}, which may be wrong: {error}"
                    ) from None

    def distrusted(self) -> tuple[CheckpointInfo, ...]:
        """What was set aside, by the path that it had; without what cannot be read any more."""
        found: list[CheckpointInfo] = []
        for name, content in self._pages_aside():
            path = self.folder / name.removeprefix(DISTRUSTED).rpartition("-")[0]
            with suppress(CheckpointError):
                found.append(CheckpointInfo(path, read_manifest(path, content)))
        return tuple(found)

    def _checked(self, found: CheckpointInfo | Skipped) -> CheckpointInfo | Skipped:
        if isinstance(found, Skipped):
            return found
        try:
            self.verify(found)
        except CheckpointError as error:
            return Skipped.of(found.path, error)
        return found

    def _keep_aside(self, info: CheckpointInfo, name: str) -> None:
        move_into_place(info.path, self.folder / name)

    def _pages_aside(self) -> Iterator[tuple[str, bytes]]:
        """The manifests of what was set aside, by the name that it has now."""
        with suppress(OSError):
            for manifest in self.folder.glob(f"{DISTRUSTED}*/{MANIFEST}"):
                yield manifest.parent.name, read_regular(manifest)

    def _set_aside(self, path: Path) -> None:
        """First from the list, in one move, then from the disk."""
        doomed = self.folder / f"{REMOVING}{path.name}-{secrets.token_hex(4)}"
        move_into_place(path, doomed)
        discard(doomed)


def cipher_of(manifest: Manifest, given: Seal | None) -> Seal | None:
    """What opens a checkpoint; None where it is plain, and no key is asked for."""
    if manifest.encryption is None and given is None:
        return None
    found: Seal | None = resolve_name("quorate.encryption.key:cipher_of")(manifest, given)
    return found


def new_name(cursor: Cursor) -> str:
    """Of an attempt that nobody else has."""
    return f"{WRITING}{checkpoint_name(cursor)}-{secrets.token_hex(4)}"


def why_not_plain(sealed: str, run: str) -> str:
    """Why nothing is read or saved without a key: an encrypted checkpoint is there, and the job names no key."""
    return (
        f"checkpoint {sealed} is encrypted, and the job of run {run} says checkpoint.encrypt: null. Name the key, as "
        "by --set checkpoint.encrypt.key_file=PATH; to continue without one, first decrypt them all: "
        f"quorate checkpoints rekey {run} --decrypt --key-file PATH"
    )


def _encrypted_in(folder: Path) -> Path | None:
    """The newest checkpoint with an encrypted part, or whose manifest says so."""
    for found in reversed(survey(folder)):
        is_said = isinstance(found, CheckpointInfo) and found.manifest.encryption is not None
        with suppress(FileNotFoundError):  # whoever writes to the run has removed it since it was listed
            if is_said or any(found.path.glob(f"*{SEALED}")):
                return found.path
    return None


def _refuse_another_state(present: CheckpointInfo, manifest: Manifest) -> None:
    from quorate.checkpoint.reshard import is_cut_alike

    found, weights_digest = present.manifest.weights_digest, manifest.weights_digest
    # Digests are of pieces: a run that goes on with another mesh has others for the same weights.
    if found not in ("", weights_digest) and is_cut_alike(present.manifest.skeleton, manifest.skeleton):
        raise CheckpointError(
            f"checkpoint {present.path} is valid and has other weights ({found}) "
            f"than those to be saved ({weights_digest}); one run cannot pass through both. "
            "Move it away, or start a new run."
        )


def explained(error: OSError, folder: Path, cursor: Cursor, needed: int) -> CheckpointError:
    """What trouble with the disk means, and what helps."""
    if error.errno in _NO_SPACE:
        remedy = "Free some space, lower `checkpoint.keep`, or choose"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "Make the folder writable, or choose"
    else:
        remedy = "Choose"
    kind = NoSpace if error.errno in _NO_SPACE else CheckpointError
    return kind(
        f"cannot save checkpoint {checkpoint_name(cursor)} in {folder}: {error.strerror or error}; "
        f"it needs {needed:,} bytes and {_free(folder)} are free. {remedy} another folder with `runs`."
    )


def _free(folder: Path) -> str:
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    try:
        return f"{shutil.disk_usage(existing or os.sep).free:,}"
    except OSError:
        return "an unknown number of"
