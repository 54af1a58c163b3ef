"""Where a run is shown: on a terminal, in a file, under a notebook's cell, or nowhere."""

import sys

from quorate.api.remains import near
from quorate.api.result import Result
from quorate.api.session import Begun, Silence, Watch
from quorate.observe.console import Console, QuietConsole
from quorate.observe.notebook import Display, NotebookConsole, notebook_display
from quorate.observe.progress import Progress
from quorate.observe.screen import Screen
from quorate.observe.sinks import Sink


def show_on_stderr(begun: Begun) -> Sink:
    """A live bar on a terminal, a line now and then elsewhere."""
    screen = _stderr()
    return Silence() if screen is None else Console(screen, _progress(begun))


def show_quietly(begun: Begun) -> Sink:
    """No progress, but warnings, and that the job is being stopped."""
    screen = _stderr()
    return Silence() if screen is None else QuietConsole(screen, _progress(begun))


def show_nothing(_: Begun) -> Sink:
    """No progress at all."""
    return Silence()


class NotebookStage:
    """Shows one run under a cell, and at its end a table of its result."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._console: NotebookConsole | None = None

    def __call__(self, begun: Begun) -> Sink:
        """Begin to show a run."""
        self._console = NotebookConsole(self._display, _progress(begun))
        return self._console

    def conclude(self, result: Result) -> None:
        """Show how it ended."""
        if self._console is not None:
            self._console.summarise(result.fields)


def watch_here(progress: bool) -> Watch | NotebookStage:
    """How a job is shown that a script or a notebook starts."""
    display = notebook_display() if progress else None
    if display is not None:
        return NotebookStage(display)
    return show_on_stderr if progress else show_nothing


def _stderr() -> Screen | None:
    # There is none in a program that was started with its standard error closed.
    return None if sys.stderr is None else Screen(sys.stderr, is_terminal=sys.stderr.isatty())


def _progress(begun: Begun) -> Progress:
    return Progress(
        run=begun.run.name,
        folder=near(begun.run.path),
        workers=begun.workers,
        lanes=begun.spec.lanes,
        early_stop=begun.spec.early_stop,
    )
