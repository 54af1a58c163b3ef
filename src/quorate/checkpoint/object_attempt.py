"""A save to an object store, by several writers on several hosts: parts first, and what each has written as a note."""

import contextlib
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from quorate.checkpoint.listing import WRITING, checkpoint_name, cursor_of
from quorate.checkpoint.manifest import MANIFEST, Part
from quorate.checkpoint.object_folder import ObjectFolder, explaining
from quorate.checkpoint.part_file import part_named, write_part
from quorate.checkpoint.seal import Seal
from quorate.core.errors import AttemptGone, CheckpointError
from quorate.core.generation import Cursor
from quorate.storage.atomic import Buffer, discard
from quorate.storage.objects import ObjectMissing, Stored

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
