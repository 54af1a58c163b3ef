"""Copies of a run's checkpoints at a further place: what is to be copied and removed there, and a thread that does it.

Nothing has to be remembered: what is here and not there is copied, the newest first, and what retention does not keep
is removed there too. So whenever a copier dies, and whoever goes on, the next look finds out what is left to do.
"""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo, cursor_of
from quorate.checkpoint.manifest import MANIFEST, Manifest
from quorate.checkpoint.retention import Retention, best_of, best_saved, surplus
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, QuorateError
from quorate.core.generation import Cursor, Phase
from quorate.storage.objects import StoreError
from quorate.stores.place import Contents, Files, Place, files_of
from quorate.stores.transfer import LEFT_BEHIND, Source, claim, copy_one

log = logging.getLogger(__name__)

LONGEST_PAUSE = 60.0
LOOK_AGAIN = 300.0
_LOOK = 0.05

Publish = Callable[[str, int | None, dict[str, Any]], None]
"""Takes the kind of an event, the step of the checkpoint, and the event's fields; from another thread."""


@dataclass(frozen=True)
class CopyPlan:
    """What there is to do at a place: checkpoints to withdraw at once, since they may be wrong; to copy, newest first;
    to remove, oldest first; and leftovers."""

    withdraw: tuple[str, ...] = ()
    copy: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()


def plan_copies(
    here: Mapping[str, Files],
    there: Contents,
    retention: Retention,
    best: int | None,
    now: float,
    distrusted: Collection[tuple[str, Files]] = (),
) -> CopyPlan:
    """What is to be done so that a place has what is here (oldest first), and no more than retention keeps.

    What is here is never removed there, nor is the newest that is there; but copies of what is `distrusted` here are.
    An unfinished copy is swept when it has not changed for a day: a younger one may be in the making, by another
    launcher of the same run.
    """
    withdraw = [name for name, files in distrusted if there.whole.get(name) == files != here.get(name)]
    copy = [name for name in here if there.whole.get(name) != here[name]]
    trusted = (name for name in there.whole if name not in withdraw)
    cursors = {cursor: name for name in trusted if (cursor := cursor_of(name)) is not None}
    doomed = surplus(list(cursors), retention, best, max(cursors, default=None))
    old = [name for name, changed in there.unfinished.items() if changed is not None and now - changed > LEFT_BEHIND]
    return CopyPlan(
        withdraw=tuple(withdraw),
        copy=tuple(reversed(copy)),
        remove=tuple(cursors[cursor] for cursor in doomed if cursors[cursor] not in here),
        sweep=tuple(sorted(name for name in old if name not in here)),
    )


def pause_after(failures: int, chance: float) -> float:
    """Seconds until the next try: twice as long each time, and not the same for everybody; `chance` is 0 to 1."""
    return min(LONGEST_PAUSE, 2.0 ** min(failures - 1, 10)) * (0.5 + chance / 2)


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
        self._folder = CheckpointFolder.at(source.run.checkpoints)
        self._manifests: dict[str, Manifest | None] = {}
        # One that is saved anew under the same name has another manifest.
        self._damaged: dict[str, Manifest] = {}
        self._copied = 0
        # A row of failures: how many, why, whether only a person mends it; since when, and when to tell of it again.
        self._failures, self._reason, self._lasts = 0, "", False
        self._began = self._again = 0.0
        self._poked = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._work, name="copier", daemon=True)
        # As it was seen last: what is missing is known also while nobody can look.
        self._there = Contents()
        self._thread.start()

    def poke(self) -> None:
        self._poked.set()

    @property
    def is_busy(self) -> bool:
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
        reason = self._reason
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
            if is_closing and (is_done or self._lasts):
                return
            pause = pause_after(self._failures, random.random())
            if is_done:
                self._poked.wait(LOOK_AGAIN)
            elif is_closing:
                self._abandoned.wait(min(1.0, pause))
            else:
                self._closing.wait(pause)

    def _look(self) -> bool:
        """Do all that there is to do now; False if that was not possible."""
        try:
            if not self._folder.list() and not self._folder.distrusted():
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
        if self._failures:
            self._failures, self._reason, self._lasts = 0, "", False
            self._publish("copy_recovered", None, seconds=round(time.monotonic() - self._began, 1))
        return True

    def _copy_newest(self) -> bool:
        """Copy the newest that is missing; False if none is. Asked anew each time: training goes on meanwhile."""
        listed = {info.path.name: info for info in self._folder.list()}
        infos = {name: info for name, info in listed.items() if self._damaged.get(name) != info.manifest}
        self._there = self._place.contents()
        plan = self._plan(list(infos.values()))
        for name in plan.withdraw:  # before anything else: a resume from there would take up the newest
            log.warning("the copy of %s at %s is removed: what it holds may be wrong", name, self._place)
            self._place.remove(name)
        if not plan.copy:
            return False
        info = infos[plan.copy[0]]
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
            [(info.path.name, files_of(info.manifest)) for info in self._folder.distrusted()],
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
        now = time.monotonic()
        if not self._failures:
            self._began, self._again = now, now
        is_news = now >= self._again or reason != self._reason
        self._failures, self._reason, self._lasts = self._failures + 1, reason, lasts
        if is_news:
            self._again = now + max(LONGEST_PAUSE, now - self._began)
            missing = self._missing()
            step = (cursor_of(missing[0]) or Cursor()).step if missing else None
            self._publish("copy_failed", step, reason=reason, missing=len(missing), tries=self._failures)

    def _publish(self, kind: str, step: int | None, **fields: Any) -> None:
        if not self._abandoned.is_set():
            with contextlib.suppress(Exception):  # whoever listens must not end the copying
                self._send(kind, step, {"place": str(self._place), **fields})
