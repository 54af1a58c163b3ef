"""The copies of a run's checkpoints at the further places of its job, made by the launcher while the job runs."""

import threading
import time
from collections.abc import Callable
from typing import Any

from quorate.api.recorded_run import run_argument
from quorate.core.errors import RequestError
from quorate.observe.event import KINDS, Event
from quorate.observe.events import (
    CheckpointCopied,
    CheckpointSaved,
    CopyFailed,
    CopyRecovered,
    LogMessage,
    RolledBack,
    RunStopped,
)
from quorate.observe.jsonl import JsonlSink
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.stores.copier import Copier, CopyStatus
from quorate.stores.place import FolderPlace, place_for
from quorate.stores.transfer import Source
from quorate.supervisor.signals import Signals

PATIENCE = 60.0
"""Seconds that the end of a job waits for copies."""
UNTOLD = 0.5
"""Seconds that it waits without a word."""


class Copies:
    """One copier for each further place. Their events are in the run's file, and shown like the others.

    A kind of store that cannot be spoken to here is refused at once: a RequestError.
    """

    def __init__(self, run: RunFolder, spec: JobSpec, show: Callable[[Event], None]) -> None:
        self._run = run
        self._show = show
        self._sink = JsonlSink(run.events_file)
        # Signals that have ended training; one more ends the wait for copies.
        self._seen_signals = 0
        # Events of copiers are shown by their threads, between those of the run.
        self._turn = threading.Lock()
        source = Source.of(run, spec)
        places = [place_for(to, run.name) for to in spec.checkpoint.to[1:]]
        for place in places:
            # A run's folder with copies in it would be neither a run nor a copy.
            if isinstance(place, FolderPlace) and place.folder.resolve().is_relative_to(run.path.resolve()):
                raise RequestError(
                    f"checkpoint.to: copies would go to {place}, which is the run's own folder. Name a folder outside "
                    f"of {run.path.parent}, best on another disk or machine."
                )
        self._copiers = [Copier(source, place, self._publish) for place in places]

    def handle(self, event: Event) -> None:
        """Take in an event of the run, and pass it on."""
        if isinstance(event, CheckpointCopied | CopyFailed | CopyRecovered):
            return  # it was shown when it was written
        if isinstance(event, RunStopped):
            self._seen_signals = 1
        elif isinstance(event, CheckpointSaved | RolledBack):  # after a rollback, copies may have to be withdrawn
            for copier in self._copiers:
                copier.poke()
        with self._turn:
            self._show(event)

    def conclude(self, signals: Signals) -> list[dict[str, Any]]:
        """The job is over: wait for what is outstanding, unless somebody asks for an end, and say what is missing.

        For each place how many checkpoints were copied, and which are missing.
        """
        over = time.monotonic() + (0.0 if signals.at_once else PATIENCE)
        for copier in self._copiers:
            copier.request_close()
        self._say_if_it_takes_long(signals)
        asked_to_end = lambda: len(signals.received) > self._seen_signals  # noqa: E731
        ended = [copier.close(max(0.0, over - time.monotonic()), asked_to_end) for copier in self._copiers]
        for status in ended:
            if status.missing:
                self._publish("log", None, {"level": "warning", "message": self._incomplete(status)})
        self._sink.close()
        return [{"place": each.place, "copied": each.copied, "missing": list(each.missing)} for each in ended]

    def abandon(self) -> list[dict[str, Any]]:
        """Nothing was trained: copy no more, and tell nothing."""
        for copier in self._copiers:
            copier.close(0.0)
        self._sink.close()
        return []

    def _say_if_it_takes_long(self, signals: Signals) -> None:
        soon = time.monotonic() + UNTOLD
        while any(copier.is_busy for copier in self._copiers):
            if time.monotonic() > soon:
                message = f"waiting for copies of checkpoints, {PATIENCE:g} s at most; Ctrl-C ends the wait"
                with self._turn:
                    self._show(LogMessage(level="info", message=message))
                return
            if signals.at_once:
                return
            time.sleep(0.02)

    def _incomplete(self, status: CopyStatus) -> str:
        sentences = [f"not copied to {status.place}: {', '.join(status.missing)}."]
        if status.damaged:
            verify = f"quorate checkpoints verify {run_argument(self._run)}"
            sentences.append(f"Damaged here, so that no copy is made: {', '.join(status.damaged)} (see {verify}).")
        if len(status.damaged) < len(status.missing):
            resume = f"quorate resume {run_argument(self._run)}"
            sentences.append(f"{status.reason} A resume copies them: {resume}; or copy {self._run.path} with any tool.")
        return " ".join(sentences)

    def _publish(self, kind: str, step: int | None, fields: dict[str, Any]) -> None:
        """Also from a copier's thread."""
        event = KINDS[kind](step=step, **fields)
        with self._turn:
            # Appended in one piece, beside what the coordinator appends: that may be dead by then, or not there yet.
            self._sink.handle(event)
            self._show(event)
