"""Events in a notebook: one display under the cell, which is changed in place."""

import html
import sys
import time
from collections.abc import Callable
from typing import Any

from quorate.observe.event import Event
from quorate.observe.live import Printed, Prints, Round, printed_lines
from quorate.observe.notices import Notice, notice_of
from quorate.observe.progress import GAP, Progress
from quorate.observe.summary import summary_rows

REDRAW_EVERY = 0.25
REDRAW_IDLE_EVERY = 1.0
"""Seconds between two, while no step ends: time goes on."""
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
        pause = REDRAW_IDLE_EVERY if isinstance(event, Round) else REDRAW_EVERY
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
