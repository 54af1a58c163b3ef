"""Runs that are kept in an object store (`engine.storage: s3://…`): claimed before the first step, and mirrored there.

What hosts share lies in the store itself: checkpoints, and who the coordinator is. The rest of the run (its job,
events, logs and result) lies in the launcher's folder, and is put there as it grows: `quorate resume s3://…/RUN` needs
no more.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from quorate.core.errors import RequestError, RunError
from quorate.spec.job import JobSpec
from quorate.storage.objects import ObjectStore, StoreError, open_store
from quorate.storage.run_folder import RunFolder
from quorate.stores.objects import refuse_unknown_store
from quorate.stores.place import ObjectPlace
from quorate.stores.transfer import Source, claim, copy_checkpoints

log = logging.getLogger(__name__)

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
