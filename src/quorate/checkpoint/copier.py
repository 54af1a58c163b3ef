"""Keeps copies of a run's checkpoints at a further place, in a thread beside training."""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quorate.checkpoint.best import best_of
from quorate.checkpoint.copying import LONGEST_PAUSE, Errands, Source, claim, copy_one, cursor_in, errands, pause_after
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.place import Contents, Files, Place, files_of
from quorate.checkpoint.retention import best_saved
from quorate.checkpoint.store import CheckpointFolder
from quorate.checkpoint.verification import MANIFEST
from quorate.core.cursor import Phase
from quorate.core.errors import CheckpointError, QuorateError
from quorate.storage.objects import StoreError

log = logging.getLogger(__name__)

LOOK_AGAIN = 300.0
_LOOK = 0.05

Tell = Callable[[str, int | None, dict[str, Any]], None]
"""Takes the kind of an event, the step of the checkpoint, and the event's fields; from another thread."""


@dataclass(frozen=True)
class Standing:
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

    def __init__(self, source: Source, place: Place, tell: Tell) -> None:
        self._source = source
        self._place = place
        self._tell = tell
        self._folder = CheckpointFolder(source.run.checkpoints)
        self._manifests: dict[str, Manifest | None] = {}
        # One that is saved anew under the same name has another manifest.
        self._damaged: dict[str, Manifest] = {}
        self._copied = 0
        self._trouble = _Trouble()
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

    def close(self, patience: float, give_up: Callable[[], bool] = lambda: False) -> Standing:
        """Wait for what is outstanding, for so many seconds or until `give_up`, and say what is missing still."""
        self.request_close()
        over = time.monotonic() + patience
        while self._thread.is_alive() and time.monotonic() < over and not give_up():
            self._thread.join(_LOOK)
        reason = self._trouble.reason
        if self._thread.is_alive():
            # It ends after what it is at; what it commits then is whole as well.
            self._abandoned.set()
            reason = reason or "it was not done in time."
        missing = self._missing()
        damaged = tuple(name for name in missing if name in self._damaged)
        return Standing(str(self._place), self._copied, missing, reason if missing else "", damaged)

    # --- the thread

    def _work(self) -> None:
        while not self._abandoned.is_set():
            self._poked.clear()
            is_closing = self._closing.is_set()
            is_done = self._look()
            if is_closing and (is_done or self._trouble.lasts):
                return
            if is_done:
                self._poked.wait(LOOK_AGAIN)
            elif is_closing:
                self._abandoned.wait(min(1.0, self._pause()))
            else:
                self._closing.wait(self._pause())

    def _pause(self) -> float:
        return pause_after(self._trouble.failures, random.random())

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
        recovered = self._trouble.end(time.monotonic())
        if recovered is not None:
            self._say("copy_recovered", None, seconds=round(recovered, 1))
        return True

    def _copy_newest(self) -> bool:
        """Copy the newest that is missing; False if none is. Asked anew each time: training goes on meanwhile."""
        infos = {info.path.name: info for info in self._candidates()}
        self._there = self._place.contents()
        missing = self._errands(list(infos.values())).copy
        if not missing:
            return False
        info = infos[missing[0]]
        try:
            copied = copy_one(info, self._place)
        except CheckpointError as error:
            if info.path.exists():  # not removed by retention meanwhile
                self._damaged[info.path.name] = info.manifest
                self._say("copy_failed", info.cursor.step, checkpoint=info.path.name, reason=error.message)
            return True
        except StoreError:
            if not info.path.exists():
                return True
            raise
        self._copied += 1
        self._damaged.pop(copied.name, None)
        self._there = replace(self._there, whole={**self._there.whole, copied.name: files_of(info.manifest)})
        self._say("copied_to", info.cursor.step, checkpoint=copied.name, bytes=copied.bytes, seconds=copied.seconds)
        return True

    def _missing(self) -> tuple[str, ...]:
        """What is not there as far as is known, newest first, also what is damaged here; nothing where the run's own
        folder cannot be read."""
        with contextlib.suppress(CheckpointError):
            return self._errands(list(self._folder.list())).copy
        return ()

    def _candidates(self) -> list[CheckpointInfo]:
        return [info for info in self._folder.list() if self._damaged.get(info.path.name) != info.manifest]

    def _clear_up(self) -> None:
        here = list(self._folder.list())
        doomed = self._errands(here)
        if doomed.remove:
            doomed = self._errands(here, self._best(self._there))
        for name in (*doomed.remove, *doomed.sweep):
            self._place.remove(name)

    def _errands(self, here: list[CheckpointInfo], best: int | None = None) -> Errands:
        return errands(_files(here), self._there, self._source.retention, best, time.time())

    def _best(self, there: Contents) -> int | None:
        """The step of the best there: a run that was fetched does not have all of them here."""
        for name in there.whole.keys() - self._manifests.keys():
            self._manifests[name] = _manifest(self._place.read(f"{name}/{MANIFEST}"))
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
        if self._trouble.take_in(reason, lasts, time.monotonic()):
            missing = self._missing()
            step = cursor_in(missing[0]).step if missing else None
            self._say("copy_failed", step, reason=reason, missing=len(missing), tries=self._trouble.failures)

    def _say(self, kind: str, step: int | None, **fields: Any) -> None:
        if not self._abandoned.is_set():
            with contextlib.suppress(Exception):  # whoever listens must not end the copying
                self._tell(kind, step, {"place": str(self._place), **fields})


class _Trouble:
    """A row of failures: when to speak of it again."""

    def __init__(self) -> None:
        self.failures = 0
        self.reason = ""
        self.lasts = False
        self._began = 0.0
        self._again = 0.0

    def take_in(self, reason: str, lasts: bool, now: float) -> bool:
        """Note a failure; whether it is worth telling."""
        if not self.failures:
            self._began, self._again = now, LONGEST_PAUSE
        is_news = not self.failures or reason != self.reason
        self.failures += 1
        self.reason, self.lasts = reason, lasts
        lasted = now - self._began
        if lasted >= self._again:
            self._again = 2 * lasted
            return True
        return is_news

    def end(self, now: float) -> float | None:
        """It works again: after how many seconds, if it did not before."""
        lasted = now - self._began if self.failures else None
        self.failures, self.reason, self.lasts = 0, "", False
        return lasted


def _files(infos: list[CheckpointInfo]) -> dict[str, Files]:
    return {info.path.name: files_of(info.manifest) for info in infos}


def _manifest(content: bytes | None) -> Manifest | None:
    with contextlib.suppress(CheckpointError, UnicodeDecodeError):
        return None if content is None else Manifest.from_json(content.decode())
    return None
