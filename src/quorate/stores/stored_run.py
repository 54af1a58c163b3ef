"""Runs that are kept in an object store (`engine.storage: s3://…`): claimed before the first step, and mirrored there.

What hosts share lies in the store itself: checkpoints, and who the coordinator is. The rest of the run (its job,
events, logs and result) lies in the launcher's folder, and is put there as it grows: `quorate resume s3://…/RUN` needs
no more. The folder of such a run has a copy of each manifest, and of the parts those that somebody has read here:
whatever reads a folder of checkpoints reads these as well. The manifest is what commits; a save by several writers on
several hosts puts parts first, and what each has written as a note.

::

    STORE/RUN/step-00000200/manifest.json       the marker that commits: it is put last and removed first
    STORE/RUN/step-00000200/1-of-2.….safetensors
    STORE/RUN/.writing-step-00000200-…/         what writers of one that is not committed tell each other
"""

import contextlib
import logging
import secrets
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quorate.checkpoint.listing import WRITING, CheckpointInfo, ShownFolder, checkpoint_name, cursor_of
from quorate.checkpoint.manifest import MANIFEST, Manifest, Part, Seal
from quorate.checkpoint.part_file import part_named, write_part
from quorate.checkpoint.store import DISTRUSTED, CheckpointFolder, explained, new_name
from quorate.core.cached import cached_property
from quorate.core.errors import AttemptGone, CheckpointError, RequestError, RunError
from quorate.core.generation import Cursor
from quorate.spec.job import JobSpec
from quorate.storage.atomic import Buffer, discard, move_into_place, write_atomically
from quorate.storage.objects import ObjectMissing, ObjectStore, Stored, StoreError, open_store
from quorate.storage.run_folder import RunFolder
from quorate.stores.objects import refuse_unknown_store
from quorate.stores.place import ObjectPlace, remove_below
from quorate.stores.transfer import Source, claim, copy_checkpoints

log = logging.getLogger(__name__)

BEGUN, VOID, VOUCHER = "begun", "void", "voucher-"
LOOK_EVERY = 0.2
"""Seconds between two looks at what the others have written: a store is asked each time."""


_NAMED = "step-"
_shown: dict[Path, str] = {}
"""What the store has called the content of each manifest that this process has shown (its tag of it)."""


class ObjectFolder(ShownFolder):
    """Of one run, in its prefix of the store."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store = store
        self.folder = folder

    def objects(self) -> dict[str, Stored]:
        """All of the run."""
        with explaining():
            return self.store.list()

    def refresh(self) -> set[str]:
        found = self.objects()
        listed = {key.partition("/")[0]: found[key] for key in found if key.endswith(f"/{MANIFEST}")}
        for name, stored in listed.items():
            manifest = self.folder / name / MANIFEST
            # Not by its size: one that was encrypted anew is as long as before. A store that has no tags is read.
            if not stored.tag or _shown.get(manifest) != stored.tag or not manifest.exists():
                with explaining(), contextlib.suppress(ObjectMissing):  # it is being removed
                    if self._show(name, self.store.read(f"{name}/{MANIFEST}"), found):
                        _shown[manifest] = stored.tag
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            if entry.name.startswith(_NAMED) and entry.name not in listed:
                discard(entry)
        return set(listed)

    def _show(self, name: str, content: bytes, found: dict[str, Stored]) -> bool:
        try:
            parts = Manifest.from_json(content.decode()).parts
            if any(f"{name}/{part.file}" not in found for part in parts):
                return False  # of a writer that was replaced, and whose parts were swept as leftovers
        except (CheckpointError, UnicodeDecodeError):
            pass  # who looks at it finds out what is wrong with it
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name / MANIFEST, content)
        return True

    def fetch(self, name: str, file: str, size: int) -> None:
        partial = self.folder / name / f".{file}.{secrets.token_hex(4)}.partial"
        try:
            with explaining(), contextlib.suppress(ObjectMissing):  # which whoever opens it tells
                self.store.fetch(f"{name}/{file}", partial, size)
                move_into_place(partial, self.folder / name / file)
        finally:
            discard(partial)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, or what lies there for one."""
        with explaining():
            if not remove_below(self.store, name):
                raise CheckpointError(f"cannot remove checkpoint {name}: it is not in {self.store}.")
        discard(self.folder / name)


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Trouble with the store, as whoever saves or loads knows it."""
    try:
        yield
    except ObjectMissing:
        raise
    except StoreError as error:
        raise CheckpointError(error.message) from None


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
        marker, store = f"{final.name}/{MANIFEST}", self._objects.store
        source = self.open(manifest.cursor, name=attempt)
        whole, written = self._completed(manifest, source)
        was_refused = False
        while True:
            listed = self._objects.refresh()
            if final.exists() and (present := self._present(final, manifest)) is not None:
                source.give_up()
                return present
            check()
            self._refuse_older(manifest)
            # Not shown though it is there: its parts were swept before its writer, which was replaced, committed them.
            with explaining():
                if final.exists() or (was_refused and final.name in listed):
                    store.remove(marker)
                is_committed = store.create(marker, written)
            if is_committed:
                source.forget()
                with contextlib.suppress(CheckpointError):  # it is saved, whether this folder shows it now or later
                    self._objects.refresh()
                return CheckpointInfo(final, whole)
            was_refused = True

    def _keep_aside(self, info: CheckpointInfo, name: str) -> None:
        with explaining():
            self._objects.store.create(name, info.manifest.to_json().encode())
        self._objects.remove(info.path.name)

    def _pages_aside(self) -> Iterator[tuple[str, bytes]]:
        names = [key for key in self._objects.objects() if key.startswith(DISTRUSTED)]
        with explaining():
            aside = [(name, self._objects.store.read(name)) for name in names]
        yield from aside
        yield from super()._pages_aside()

    def _set_aside(self, path: Path) -> None:
        self._objects.remove(path.name)


OWNER = "owner"
EVERY = 5.0
"""Seconds between two looks at what has changed."""
AT_MOST = 2**20
"""Bytes a second that a file which grows is put with: a store has no appending, so it is put as a whole."""


def refuse_unusable_store(spec: JobSpec, url: str) -> None:
    """Before a run has its folder."""
    refuse_unknown_store(url)
    if spec.strategy.is_gang:
        raise RequestError(
            "engine.storage: Ray Train, which starts the workers of ddp and fsdp, needs a folder that all hosts have "
            "mounted. Copies go to a store with checkpoint.to."
        )


def keep_in_store(run: RunFolder, spec: JobSpec, url: str) -> None:
    """Have the run in the store that its job names, with what an earlier part of it has saved here."""
    store = open_store(f"{url.rstrip('/')}/{run.name}")
    if run.stored is not None:
        if run.stored.url != store.url:
            raise RunError(
                f"engine.storage: run {run.name} is kept in {run.stored}, and the job says {store}. Leave it there; "
                "copies go elsewhere with checkpoint.to."
            )
        return
    created = run.created.isoformat().encode()
    source, place = Source.of(run, spec), ObjectPlace(store)
    try:
        # Two folders of runs may have one store, and a run of the same name each.
        if not store.create(OWNER, created) and store.read(OWNER) != created:
            raise RunError(
                f"engine.storage: {store} is that of another run of this name. Give the job another name, or another "
                "storage."
            )
        claim(source, place)
        copy_checkpoints(source, place)
    except StoreError as error:
        raise RunError(f"engine.storage: {error.message}") from None
    run.keep_in(store)


@contextlib.contextmanager
def mirrored(run: RunFolder, spec: JobSpec) -> Iterator[None]:
    """While a part of a run is trained, and at its end: what its folder has besides, in the store."""
    mirror = _Mirror(run, spec)
    try:
        yield
    finally:
        mirror.close()


class _Mirror:
    """A thread that puts what has changed."""

    def __init__(self, run: RunFolder, spec: JobSpec) -> None:
        self._run = run
        self._source = Source.of(run, spec)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._due: dict[Path, float] = {}
        self._is_over = threading.Event()
        self._complaint = ""
        self._thread = threading.Thread(target=self._keep, name="mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._is_over.wait(EVERY):
            self._put_changed(time.monotonic())
        self._put_changed(float("inf"))

    def _put_changed(self, now: float) -> None:
        store = RunFolder(self._run.path).stored  # known once the run is claimed
        if store is None:
            return
        try:
            for file in self._files():
                self._put(store, file, now)
            self._complaint = ""
        except (StoreError, OSError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("the run's folder is not mirrored now: %s", error)

    def _files(self) -> Iterator[Path]:
        run = self._run
        yield from (run.job_file, run.environment_file, run.events_file, run.result_file, *sorted(run.logs.glob("*")))

    def _put(self, store: ObjectStore, file: Path, now: float) -> None:
        if not file.is_file() or now < self._due.get(file, 0.0):
            return
        status = file.stat()
        stamp = status.st_mtime_ns, status.st_size
        if self._seen.get(file) == stamp:
            return
        if file == self._run.environment_file:
            claim(self._source, ObjectPlace(store))  # with the source of the task, which is known by now
        store.put_file(str(file.relative_to(self._run.path)), file)
        self._seen[file] = stamp
        self._due[file] = time.monotonic() + status.st_size / AT_MOST
