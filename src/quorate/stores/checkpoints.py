"""The checkpoints of a run in an object store, where the manifest is what commits, and a save by several writers on
several hosts: parts first, and what each has written as a note."""

import contextlib
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from quorate.checkpoint.listing import WRITING, CheckpointInfo, checkpoint_name, cursor_of
from quorate.checkpoint.manifest import MANIFEST, Manifest, Part, Seal
from quorate.checkpoint.part_file import part_named, write_part
from quorate.checkpoint.store import DISTRUSTED, CheckpointFolder, explained, new_name
from quorate.core.errors import AttemptGone, CheckpointError
from quorate.core.generation import Cursor
from quorate.storage.atomic import Buffer, discard
from quorate.storage.objects import ObjectMissing, Stored
from quorate.storage.run_folder import RunFolder
from quorate.stores.object_folder import ObjectFolder, explaining

log = logging.getLogger(__name__)

BEGUN, VOID, VOUCHER = "begun", "void", "voucher-"
LOOK_EVERY = 0.2
"""Seconds between two looks at what the others have written: a store is asked each time."""


@dataclass
class ObjectAttempt:
    """Fulfils `Attempt`. A part is written here, and put under the checkpoint's own name: it has its digest in its
    name, so nothing is ever overwritten. It becomes a checkpoint by the manifest."""

    name: str
    cursor: Cursor
    objects: ObjectFolder
    digest: str
    cipher: Seal | None
    # What trouble with this disk means.
    explain: Callable[[OSError], CheckpointError]
    _seen: dict[str, Stored] = field(default_factory=dict)
    _look_due: float = 0.0

    @property
    def _final(self) -> str:
        return checkpoint_name(self.cursor)

    def begin(self) -> None:
        """Make it known to those who take part."""
        self._put(BEGUN, b"begun")

    def write(self, index: int, parts: int, chunks: Iterable[Buffer]) -> Part:
        self._notes()
        # Of this writer alone: others of this host write to the same attempt.
        here = self.objects.folder / f"{self.name}-{index}"
        try:
            here.mkdir(parents=True, exist_ok=True)
            part = write_part(here, f"{index + 1}-of-{parts}", chunks, digest=self.digest, cipher=self.cipher)
            with explaining():
                self.objects.store.put_file(f"{self._final}/{part.file}", here / part.file)
        except OSError as error:
            raise self.explain(error) from error
        finally:
            discard(here)
        self._put(part.file, b"written")
        return part

    def written(self) -> dict[int, Part]:
        found: dict[int, Part] = {}
        for note in sorted(self._notes(), reverse=True):
            there = self._seen.get(f"{self._final}/{note}")
            named = None if there is None else part_named(note, there.bytes)
            if named is not None:
                found[named[0]] = named[1]
        return dict(sorted(found.items()))

    def vouch(self, position: int, voucher: bytes) -> None:
        self._notes()
        sealed = voucher if self.cipher is None else b64encode(b"".join(self.cipher.seal([voucher])))
        self._put(f"{VOUCHER}{position}", sealed)

    def vouchers(self) -> dict[int, bytes]:
        found = {}
        for note in self._notes():
            if note.startswith(VOUCHER):
                try:
                    with explaining():
                        sealed = self.objects.store.read(f"{self.name}/{note}")
                except ObjectMissing:  # it was committed or swept since it was listed
                    raise self._gone from None
                opened = sealed if self.cipher is None else bytes(self.cipher.open(b64decode(sealed)))
                found[int(note.removeprefix(VOUCHER))] = opened
        return found

    def sweep(self) -> None:
        self._notes()
        whole = {key.partition("/")[0] for key in self._seen if key.endswith(f"/{MANIFEST}")}
        for key in self._seen:
            name = key.partition("/")[0]
            is_left = name.startswith(WRITING) or (cursor_of(name) is not None and name not in whole)
            if is_left and name not in (self.name, self._final):
                with explaining():
                    self.objects.store.remove(key)

    def give_up(self) -> None:
        # Whoever gives up may do so because the store is away: to fail here would leave the save without an end.
        with self._best_effort():
            self._put(VOID, b"void")

    def forget(self) -> None:
        """It is committed: what was written on the way is no longer needed."""
        with self._best_effort():
            for note in self._notes():
                with explaining():
                    self.objects.store.remove(f"{self.name}/{note}")

    @contextlib.contextmanager
    def _best_effort(self) -> Iterator[None]:
        """For what the next save sweeps away if it stays."""
        try:
            yield
        except CheckpointError as error:
            log.info("notes of %s are left in the store: %s", self.name, error)

    @property
    def _gone(self) -> AttemptGone:
        return AttemptGone(f"attempt {self.name} was abandoned by another writer")

    def _put(self, note: str, content: bytes) -> None:
        with explaining():
            self.objects.store.put(f"{self.name}/{note}", content)

    def _notes(self) -> list[str]:
        """What the writers have put there. Raises `AttemptGone`."""
        time.sleep(max(0.0, self._look_due - time.monotonic()))
        self._seen = self.objects.objects()
        self._look_due = time.monotonic() + LOOK_EVERY
        notes = [key.removeprefix(f"{self.name}/") for key in self._seen if key.startswith(f"{self.name}/")]
        if BEGUN not in notes or VOID in notes:
            raise self._gone
        return notes


class StoredCheckpoints(CheckpointFolder):
    """Of several who put the manifest of one, one alone commits."""

    @cached_property
    def _objects(self) -> ObjectFolder:
        store = RunFolder(self.folder.parent).stored
        assert store is not None, self.folder
        return ObjectFolder(store, self.folder)

    def open(self, cursor: Cursor, needed: int = 0, name: str = "") -> ObjectAttempt:
        explain = partial(explained, folder=self.folder, cursor=cursor, needed=needed)
        attempt = ObjectAttempt(name or new_name(cursor), cursor, self._objects, self.digest, self.cipher, explain)
        if not name:
            attempt.begin()
        return attempt

    def commit(self, attempt: str, manifest: Manifest, check: Callable[[], None]) -> CheckpointInfo:
        final = self.folder / checkpoint_name(manifest.cursor)
        source = self.open(manifest.cursor, name=attempt)
        whole, written = self._completed(manifest, source)
        was_refused = False
        while True:
            listed = self._objects.refresh()
            if (present := self._present(final, manifest)) is not None:
                source.give_up()
                return present
            check()
            self._refuse_older(manifest)
            # Not shown though it is there: its parts were swept before its writer, which was replaced, committed them.
            if final.exists() or (was_refused and final.name in listed):
                self._objects.uncommit(final.name)
            if self._objects.commit(final.name, written):
                source.forget()
                with contextlib.suppress(CheckpointError):  # it is saved, whether this folder shows it now or later
                    self._objects.refresh()
                return CheckpointInfo(final, whole)
            was_refused = True

    def _keep_aside(self, info: CheckpointInfo, name: str) -> None:
        self._objects.keep(name, info.manifest.to_json().encode())
        self._objects.remove(info.path.name)

    def _pages_aside(self) -> Iterator[tuple[str, bytes]]:
        yield from self._objects.kept(DISTRUSTED)
        yield from super()._pages_aside()

    def _set_aside(self, path: Path) -> None:
        self._objects.remove(path.name)
