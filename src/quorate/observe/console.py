"""Events on a screen: a live bar on a terminal, a line now and then anywhere else, one display in a notebook."""

import html
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.live import Live
from rich.text import Text

from quorate.observe import events
from quorate.observe.event import Event
from quorate.observe.notices import Notice, notice_of
from quorate.observe.progress import GAP, Progress
from quorate.observe.screen import Screen, summary_rows
from quorate.observe.sinks import Printed, Prints, Round, printed_lines

REDRAW_EVERY = 0.1
REDRAW_IDLE_EVERY = 1.0
"""Seconds between two, while no step ends: time goes on."""
LINE_EVERY = 5.0
_LOUD = (events.RunStopped, events.WorkerLost, events.LogMessage, events.CopyFailed)


class Console:
    """Shows how a job goes on; where it `is_quiet`, only what nobody should miss: that the job is being stopped, lost
    workers and other warnings.

    The screen is redrawn when events come and by no thread of its own: a process with a second thread cannot fork
    workers safely.
    """

    def __init__(
        self,
        screen: Screen,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
        prints: Prints = Prints.FIRST,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._screen = screen
        self._progress = progress
        self._clock = clock
        self._prints = prints
        self._is_quiet = is_quiet
        self._shown: int | None = None
        self._shown_at: float | None = None
        self._live: Live | None = None
        if screen.is_terminal and not screen.is_dumb_terminal and not is_quiet:
            self._live = Live(console=screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
            self._live.update(progress, refresh=True)

    def handle(self, event: Event) -> None:
        if isinstance(event, Printed):
            _print_lines(self._screen, printed_lines(event, self._prints))
            return
        notice = notice_of(event, self._progress) if not self._is_quiet or _is_loud(event) else None
        is_new = isinstance(event, Round) and event.doing != self._progress.doing
        self._progress.handle(event)
        if isinstance(event, events.RunFinished):
            self.close()
        if isinstance(event, Round) and self._live is not None:
            self._show_progress(at_once=is_new, pause=REDRAW_IDLE_EVERY)
        if notice is not None:
            _print(self._screen, notice)
        if isinstance(event, events.StepCompleted | events.RunBegan) and not self._is_quiet:
            self._show_progress(at_once=self._progress.step == self._progress.total_steps)

    def _show_progress(self, at_once: bool, pause: float = REDRAW_EVERY) -> None:
        now = self._clock()
        pause = LINE_EVERY if self._live is None else pause
        if self._shown_at is not None and now - self._shown_at < pause and not at_once:
            return
        if self._live is not None:
            self._live.update(self._progress, refresh=True)
        elif self._progress.latest is not None and self._progress.step != self._shown:
            _print(self._screen, Notice(GAP.join([self._progress.place, *self._progress.facts]), ""))
        else:
            return
        self._shown, self._shown_at = self._progress.step, now

    def close(self) -> None:
        """The last step is shown always, also when the next line is not due yet, and stays on the screen."""
        live, self._progress.is_over = self._live, True
        if self._is_quiet:
            return
        if live is None or self._progress.has_begun:
            self._show_progress(at_once=True)
        if live is not None:
            self._live = None
            live.transient = not self._progress.has_begun  # of a job that never began nothing is left on the screen
            live.stop()


def _is_loud(event: Event) -> bool:
    if isinstance(event, events.StepCompleted | events.EvaluationDone):
        return bool(event.warnings)
    return isinstance(event, _LOUD) and not (isinstance(event, events.LogMessage) and event.level == "info")


def _print(screen: Screen, notice: Notice) -> None:
    """Print a notice: broken between words on a terminal, and in a file one line, however long."""
    screen.print(Text(notice.text, style=notice.style), soft_wrap=not screen.is_terminal)


def _print_lines(screen: Screen, lines: list[str]) -> None:
    """Print what a task has printed, as it is: it may be a table."""
    if lines:
        screen.print(Text("\n".join(lines)), soft_wrap=True)


# --- in a notebook: one display under the cell, which is changed in place

_REDRAW_CELL_EVERY = 0.25
KEPT_NOTICES = 8

Bundle = dict[str, str]
"""What a display shows, by media type: every front end takes the one that it knows."""
Display = Callable[[Bundle], None]
"""A place in a notebook. A call shows a bundle there, instead of the one before."""


def notebook_display() -> Display | None:
    """A display under the cell that runs, if this process is the kernel of a notebook."""
    # Not imported here: what runs in a kernel has IPython imported already.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return _CellDisplay() if getattr(shell, "kernel", None) is not None else None


class _CellDisplay:
    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, bundle: Bundle) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)


class NotebookConsole:
    """Shows how a job goes on: a bar, the numbers of the last steps and the latest notices; a table at the end.

    It is drawn when events come and by no thread of its own.
    """

    def __init__(self, display: Display, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._display = display
        self._progress = progress
        self._clock = clock
        self._notices: list[Notice] = []
        self._drawn_at = float("-inf")
        self._draw()

    def handle(self, event: Event) -> None:
        if isinstance(event, Printed):
            # As text under the cell, below the display: where a notebook shows what is printed.
            for line in printed_lines(event, Prints.FIRST):
                print(line, flush=True)
            return
        notice = notice_of(event, self._progress)
        self._progress.handle(event)
        if notice is not None:
            self._notices.append(notice)
        pause = REDRAW_IDLE_EVERY if isinstance(event, Round) else _REDRAW_CELL_EVERY
        if notice is not None or self._clock() - self._drawn_at >= pause:
            self._draw()

    def close(self) -> None:
        self._progress.is_over = True
        self._draw()

    def summarise(self, result: dict[str, Any]) -> None:
        """Show how it ended in place of how it went on."""
        rows = [("run", str(result.get("run"))), ("status", str(result.get("status"))), *summary_rows(result)]
        column = max(len(label) for label, _ in rows) + 2
        self._display(
            {
                "text/plain": "\n".join(f"{label:<{column}}{value}" for label, value in rows),
                "text/html": html_table(rows),
            }
        )

    def _draw(self) -> None:
        self._drawn_at = self._clock()
        progress = self._progress
        numbers, bar = progress.start, ""
        if progress.has_begun:
            numbers = GAP.join([progress.place, *progress.facts])
            if progress.total_steps:
                bar = f'<progress value="{progress.step}" max="{progress.total_steps}"></progress> '
        # The first notice says which run it is.
        notices = [notice.text for notice in (*self._notices[:1], *self._notices[1:][-KEPT_NOTICES:])]
        paragraphs = "".join(f"<div>{html.escape(text)}</div>" for text in notices)
        self._display(
            {
                "text/plain": "\n".join([*notices, numbers]),
                "text/html": f"{bar}<b>{html.escape(numbers)}</b>{paragraphs}",
            }
        )


def html_table(rows: list[tuple[str, str]]) -> str:
    """Labels and values as a table."""
    cells = (f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>" for label, value in rows)
    return f"<table>{''.join(cells)}</table>"
