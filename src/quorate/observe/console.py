"""Events on a screen: a live bar on a terminal, a line now and then anywhere else."""

import time
from collections.abc import Callable
from pathlib import PurePath
from typing import TextIO

from rich.live import Live
from rich.text import Text

from quorate.observe.event import Event
from quorate.observe.progress import GAP, Progress
from quorate.observe.quantities import duration, measure, size
from quorate.observe.screen import Screen

REDRAW_EVERY = 0.1
LINE_EVERY = 5.0


class Console:
    """Shows how a job goes on.

    The screen is redrawn when events come and by no thread of its own: a process with a second thread cannot fork
    workers safely.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        is_terminal: bool,
        total_steps: int | None,
        workers: int,
        lanes: int,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ) -> None:
        self._screen = Screen(stream, is_terminal, width)
        self._progress = Progress(total_steps, workers, lanes)
        self._clock = clock
        self._shown_at: float | None = None
        self._live: Live | None = None
        if self._screen.is_terminal and not self._screen.is_dumb_terminal:
            self._live = Live(console=self._screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._notices: dict[str, Callable[[Event], Text | None]] = {
            "run": self._run,
            "generation": self._generation,
            "evaluation": _evaluation,
            "checkpoint": _checkpoint,
            "stop": _stop,
            "failure": _failure,
            "finished": self._finished,
            "log": _log,
        }

    def handle(self, event: Event) -> None:
        """Show an event."""
        if event.kind == "step":
            self._progress.advance(event)
            self._show_progress()
        elif event.kind in self._notices:
            notice = self._notices[event.kind](event)
            if notice is not None:
                self._print(notice)

    def close(self) -> None:
        """Leave the last state of the bar on the screen and show nothing more."""
        live, self._live = self._live, None
        if live is not None and live.is_started:
            live.update(self._progress, refresh=True)
            live.stop()

    def _show_progress(self) -> None:
        now = self._clock()
        pause = LINE_EVERY if self._live is None else REDRAW_EVERY
        at_the_end = self._progress.step == self._progress.total_steps
        if self._shown_at is not None and now - self._shown_at < pause and not at_the_end:
            return
        self._shown_at = now
        if self._live is None:
            self._print(Text(GAP.join([self._progress.place, *self._progress.facts])))
            return
        # Only now, so that nothing is drawn for a job that fails before its first step.
        self._live.start()
        self._live.update(self._progress, refresh=True)

    def _print(self, line: Text) -> None:
        # A line in a log file stays one line, however long; a terminal breaks it by itself.
        self._screen.print(line, soft_wrap=True)

    def _run(self, event: Event) -> None:
        self._progress.total_steps = event.fields.get("total_steps", self._progress.total_steps)

    def _generation(self, event: Event) -> Text | None:
        members = event.fields.get("members", [])
        first = self._progress.step == 0
        self._progress.workers = len(members) or self._progress.workers
        self._progress.lanes = event.fields.get("lanes", self._progress.lanes)
        return None if first else Text(f"going on with {self._progress.hosting}", style="yellow")

    def _finished(self, event: Event) -> Text:
        step = event.step if event.step is not None else self._progress.step
        return Text(f"finished after {step:,} steps", style="green")


def _evaluation(event: Event) -> Text:
    metrics = GAP.join(f"{name} {measure(value)}" for name, value in event.fields.get("metrics", {}).items())
    text = Text(f"evaluation{_at(event)}: {metrics}", style="cyan")
    return text.append("   best so far", style="bold") if event.fields.get("best") else text


def _checkpoint(event: Event) -> Text:
    name = PurePath(event.fields.get("path", "")).name
    cost = f"{size(event.fields.get('bytes', 0))} in {duration(event.fields.get('seconds', 0.0))}"
    return Text(f"checkpoint {name}: {cost}", style="dim")


def _stop(event: Event) -> Text:
    return Text(f"stopping{_at(event)}: {event.fields.get('reason', 'asked to')}", style="yellow")


def _failure(event: Event) -> Text:
    return Text(f"failed{_at(event)}: {event.fields.get('message', 'no reason was given')}", style="bold red")


def _log(event: Event) -> Text | None:
    message = event.fields.get("message")
    return None if message is None else Text(str(message), style="yellow")


def _at(event: Event) -> str:
    return "" if event.step is None else f" at step {event.step:,}"
