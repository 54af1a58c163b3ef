"""Copies of a run's checkpoints at a further place: what is to be copied and removed there, and a thread that does it.

Nothing has to be remembered: what is here and not there is copied, the newest first, and what retention does not keep
is removed there too. So whenever a copier dies, and whoever goes on, the next look finds out what is left to do.
"""

import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo, cursor_of
from quorate.checkpoint.manifest import MANIFEST, Manifest
from quorate.checkpoint.place import Contents, Files, Place, files_of
from quorate.checkpoint.retention import Retention, Watched, best_of, best_saved, surplus
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, QuorateError
from quorate.core.generation import Cursor, Phase
from quorate.core.regular_file import read_regular
from quorate.spec.job import JobSpec
from quorate.storage.kept_source import read_source
from quorate.storage.objects import StoreError
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

ORIGIN = "origin.json"
SOURCE_PAGE = "source.json"
LEFT_BEHIND = 24 * 3600.0
"""Seconds since its last change after which an unfinished copy is nobody's any more."""
LONGEST_PAUSE = 60.0
LOOK_AGAIN = 300.0
_LOOK = 0.05

Publish = Callable[[str, int | None, dict[str, Any]], None]
"""Takes the kind of an event, the step of the checkpoint, and the event's fields; from another thread."""


@dataclass(frozen=True)
class CopyPlan:
    """What there is to do at a place: checkpoints to copy, newest first; to remove, oldest first; and leftovers."""

    copy: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()


def plan_copies(
    here: Mapping[str, Files], there: Contents, retention: Retention, best: int | None, now: float
) -> CopyPlan:
    """What is to be done so that a place has what is here, and no more than retention keeps.

    What is here is never removed there, nor is the newest that is there. An unfinished copy is swept when it has not
    changed for a day: a younger one may be in the making, by another launcher of the same run.
    """
    copy = [name for name in here if there.whole.get(name) != here[name]]
    cursors = {cursor: name for name in there.whole if (cursor := cursor_of(name)) is not None}
    doomed = surplus(list(cursors), retention, best, max(cursors, default=None))
    old = [name for name, changed in there.unfinished.items() if changed is not None and now - changed > LEFT_BEHIND]
    return CopyPlan(
        copy=tuple(sorted(copy, key=cursor_in, reverse=True)),
        remove=tuple(cursors[cursor] for cursor in doomed if cursors[cursor] not in here),
        sweep=tuple(sorted(name for name in old if name not in here)),
    )


def pause_after(failures: int, chance: float) -> float:
    """Seconds until the next try: twice as long each time, and not the same for everybody; `chance` is 0 to 1."""
    return min(LONGEST_PAUSE, 2.0 ** min(failures - 1, 10)) * (0.5 + chance / 2)


@dataclass(frozen=True)
class Source:
    """A run whose checkpoints are copied, and what its job says about which to keep.

    The source of its task is copied as well (`with_source`): in plain, so not beside encrypted checkpoints.
    """

    run: RunFolder
    retention: Retention
    watched: Watched
    with_source: bool = True

    @classmethod
    def of(cls, run: RunFolder, spec: JobSpec) -> "Source":
        """As a job says it."""
        rules = spec.checkpoint
        return cls(
            run,
            Retention(rules.keep, rules.keep_every),
            Watched.by(spec.model_dump(include={"evaluate"})),
            with_source=rules.source and rules.encrypt is None,
        )

    @property
    def origin(self) -> bytes:
        """Tells this run from another of the same name, on another machine say."""
        return json.dumps({"run": self.run.name, "created": self.run.created.isoformat()}).encode() + b"\n"

    def pages(self) -> dict[str, bytes]:
        """What a copy of a run has beside checkpoints."""
        files = [file for file in (self.run.job_file, self.run.environment_file) if file.is_file()]
        pages = {file.name: read_regular(file) for file in files}
        kept = read_source(self.run.path) if self.with_source else None
        return pages if kept is None else {**pages, SOURCE_PAGE: kept.to_page()}


@dataclass(frozen=True)
class Copied:
    """A checkpoint that was copied."""

    name: str
    bytes: int
    seconds: float


def copy_checkpoints(source: Source, place: Place, which: Sequence[CheckpointInfo] | None = None) -> tuple[Copied, ...]:
    """Copy these checkpoints of a run, or all of them, to a place, with what a resume needs beside them.

    Those that are there already are left as they are, and not returned; nothing is removed. Raises `StoreError` (with a
    remedy) for trouble with the place and `CheckpointError` for a checkpoint that is damaged. For `checkpoints copy`::

        place = place_for("s3://bucket/prefix", run.name)
        copied = copy_checkpoints(Source.of(run, spec), place)
    """
    claim(source, place)
    infos = CheckpointFolder(source.run.checkpoints).list() if which is None else which
    there = place.contents().whole
    missing = [info for info in infos if there.get(info.path.name) != files_of(info.manifest)]
    return tuple(copy_one(info, place) for info in sorted(missing, key=lambda info: info.cursor, reverse=True))


def claim(source: Source, place: Place) -> None:
    """Say whose copies these are, with what a resume needs; refuse a place that has those of another run."""
    present = place.read(ORIGIN)
    if present is None:
        place.write(ORIGIN, source.origin)
    elif present != source.origin:
        raise StoreError(
            f"{place}: there are copies of another run of that name ({_created(present)}). Choose another place with "
            "`checkpoint.to`, or another `name` for the job.",
            lasts=True,
        )
    for name, content in source.pages().items():
        if place.read(name) != content:
            place.write(name, content)
    if not source.with_source and place.read(SOURCE_PAGE) is not None:
        place.remove(SOURCE_PAGE)  # from before the checkpoints were encrypted, or the source was to stay at home


def copy_one(info: CheckpointInfo, place: Place) -> Copied:
    """Copy a checkpoint, and say what it took."""
    started = time.monotonic()
    size = place.put(info)
    return Copied(info.path.name, size, round(time.monotonic() - started, 3))


@dataclass(frozen=True)
class CopyStatus:
    """How it stands with a place: how many checkpoints were copied, which are missing there, and why.

    Those of them that are damaged here cannot be copied.
    """

    place: str
    copied: int
    missing: tuple[str, ...] = ()
    reason: str = ""
    damaged: tuple[str, ...] = ()


class Copier:
    """Copies what a run saves to one place, in a thread of its own.

    `poke` says that there is something new. Trouble with the place never reaches training: it is told, and tried again
    with growing pauses. `close` waits for what is outstanding. Events: ``copied_to``, ``copy_failed`` (the first of a
    row, and then each time that it has lasted twice as long), ``copy_recovered``.
    """

    def __init__(self, source: Source, place: Place, publish: Publish) -> None:
        self._source = source
        self._place = place
        self._send = publish
        self._folder = CheckpointFolder(source.run.checkpoints)
        self._manifests: dict[str, Manifest | None] = {}
        # One that is saved anew under the same name has another manifest.
        self._damaged: dict[str, Manifest] = {}
        self._copied = 0
        self._failures = _Failures()
        self._poked = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._work, name="copier", daemon=True)
        # As it was seen last: what is missing is known also while nobody can look.
        self._there = Contents()
        self._thread.start()

    def poke(self) -> None:
        """There may be a new checkpoint."""
        self._poked.set()

    @property
    def is_busy(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def request_close(self) -> None:
        """Copy what there is and then end; without the pauses between tries."""
        self._closing.set()
        self._poked.set()

    def close(self, patience: float, give_up: Callable[[], bool] = lambda: False) -> CopyStatus:
        """Wait for what is outstanding, for so many seconds or until `give_up`, and say what is missing still."""
        self.request_close()
        over = time.monotonic() + patience
        while self._thread.is_alive() and time.monotonic() < over and not give_up():
            self._thread.join(_LOOK)
        reason = self._failures.reason
        if self._thread.is_alive():
            # It ends after what it is at; what it commits then is whole as well.
            self._abandoned.set()
            reason = reason or "it was not done in time."
        missing = self._missing()
        damaged = tuple(name for name in missing if name in self._damaged)
        return CopyStatus(str(self._place), self._copied, missing, reason if missing else "", damaged)

    # --- the thread

    def _work(self) -> None:
        while not self._abandoned.is_set():
            self._poked.clear()
            is_closing = self._closing.is_set()
            is_done = self._look()
            if is_closing and (is_done or self._failures.lasts):
                return
            pause = pause_after(self._failures.count, random.random())
            if is_done:
                self._poked.wait(LOOK_AGAIN)
            elif is_closing:
                self._abandoned.wait(min(1.0, pause))
            else:
                self._closing.wait(pause)

    def _look(self) -> bool:
        """Do all that there is to do now; False if that was not possible."""
        try:
            if not self._folder.list():
                return True  # a run that ends before its first checkpoint leaves no trace, there neither
            claim(self._source, self._place)
            while self._copy_newest() and not self._abandoned.is_set():
                pass
            self._clear_up()
        except StoreError as error:
            self._note(error, error.lasts)
            return False
        except (QuorateError, OSError) as error:
            self._note(error, lasts=False)  # of the run's own folder: a disk that is away for a moment, say
            return False
        except Exception as error:
            # One defect here must not end the thread, or copies silently end with it.
            log.exception("copying to %s failed", self._place)
            self._note(error, lasts=True)
            return False
        recovered = self._failures.end(time.monotonic())
        if recovered is not None:
            self._publish("copy_recovered", None, seconds=round(recovered, 1))
        return True

    def _copy_newest(self) -> bool:
        """Copy the newest that is missing; False if none is. Asked anew each time: training goes on meanwhile."""
        listed = {info.path.name: info for info in self._folder.list()}
        infos = {name: info for name, info in listed.items() if self._damaged.get(name) != info.manifest}
        self._there = self._place.contents()
        missing = self._plan(list(infos.values())).copy
        if not missing:
            return False
        info = infos[missing[0]]
        try:
            copied = copy_one(info, self._place)
        except CheckpointError as error:
            if info.path.exists():  # not removed by retention meanwhile
                self._damaged[info.path.name] = info.manifest
                self._publish("copy_failed", info.cursor.step, checkpoint=info.path.name, reason=error.message)
            return True
        except StoreError:
            if not info.path.exists():
                return True
            raise
        self._copied += 1
        self._damaged.pop(copied.name, None)
        self._there = replace(self._there, whole={**self._there.whole, copied.name: files_of(info.manifest)})
        self._publish("copied_to", info.cursor.step, checkpoint=copied.name, bytes=copied.bytes, seconds=copied.seconds)
        return True

    def _missing(self) -> tuple[str, ...]:
        """What is not there as far as is known, newest first, also what is damaged here; nothing where the run's own
        folder cannot be read."""
        with contextlib.suppress(CheckpointError):
            return self._plan(list(self._folder.list())).copy
        return ()

    def _clear_up(self) -> None:
        here = list(self._folder.list())
        doomed = self._plan(here)
        if doomed.remove:
            doomed = self._plan(here, self._best(self._there))
        for name in (*doomed.remove, *doomed.sweep):
            self._place.remove(name)

    def _plan(self, here: list[CheckpointInfo], best: int | None = None) -> CopyPlan:
        return plan_copies(
            {info.path.name: files_of(info.manifest) for info in here},
            self._there,
            self._source.retention,
            best,
            time.time(),
        )

    def _best(self, there: Contents) -> int | None:
        """The step of the best there: a run that was fetched does not have all of them here."""
        for name in there.whole.keys() - self._manifests.keys():
            self._manifests[name] = None
            content = self._place.read(f"{name}/{MANIFEST}")
            with contextlib.suppress(CheckpointError, UnicodeDecodeError):  # a damaged one tells nothing
                self._manifests[name] = None if content is None else Manifest.from_json(content.decode())
        known = {name: self._manifests[name] for name in there.whole}
        infos = [CheckpointInfo(self._folder.folder / name, each) for name, each in known.items() if each is not None]
        bests = {info.cursor: info.best for info in infos}
        if (step := best_saved(list(bests), bests)) is not None:
            return step
        # Of those that earlier versions have saved, which do not tell.
        evaluated = {info.cursor.step: info.manifest.metrics for info in infos if info.cursor.phase is Phase.EVALUATED}
        best = best_of(evaluated, self._source.watched)
        return None if best is None else best.step

    def _note(self, error: Exception, lasts: bool) -> None:
        reason = error.message if isinstance(error, QuorateError) else f"{type(error).__name__}: {error}"
        if self._failures.add(reason, lasts, time.monotonic()):
            missing = self._missing()
            step = cursor_in(missing[0]).step if missing else None
            self._publish("copy_failed", step, reason=reason, missing=len(missing), tries=self._failures.count)

    def _publish(self, kind: str, step: int | None, **fields: Any) -> None:
        if not self._abandoned.is_set():
            with contextlib.suppress(Exception):  # whoever listens must not end the copying
                self._send(kind, step, {"place": str(self._place), **fields})


class _Failures:
    """A row of failures: when to tell of it again."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self.lasts = False
        self._began = 0.0
        self._again = 0.0

    def add(self, reason: str, lasts: bool, now: float) -> bool:
        """Note a failure; whether it is worth telling."""
        if not self.count:
            self._began, self._again = now, LONGEST_PAUSE
        is_news = not self.count or reason != self.reason
        self.count += 1
        self.reason, self.lasts = reason, lasts
        lasted = now - self._began
        if lasted >= self._again:
            self._again = 2 * lasted
            return True
        return is_news

    def end(self, now: float) -> float | None:
        """It works again: after how many seconds, if it did not before."""
        lasted = now - self._began if self.count else None
        self.count, self.reason, self.lasts = 0, "", False
        return lasted


def _created(origin: bytes) -> str:
    try:
        return f"created {json.loads(origin)['created']}"
    except (ValueError, KeyError, TypeError):
        return "its origin.json cannot be read"


def cursor_in(name: str) -> Cursor:
    """The cursor of a checkpoint's name."""
    return cursor_of(name) or Cursor()
