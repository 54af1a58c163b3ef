"""A run that goes on, shown as the command that started it shows it: from its events, until it has ended."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

from quorate.api.recorded_run import short_path
from quorate.core.regular_file import opened_regular
from quorate.observe.console import Console
from quorate.observe.event import Event
from quorate.observe.events import read_event
from quorate.observe.progress import Progress
from quorate.observe.screen import Screen
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder

LOOK_EVERY = 0.2
_STEP = b'{"kind":"step",'


def follow_run(
    folder: RunFolder,
    screen: Screen | None = None,
    is_running: Callable[[], bool] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show what a run tells from now on; returns when nobody is at work on it any more."""
    is_running = is_running or (lambda: folder.holder() is not None)
    if not is_running():
        return
    spec = load_recorded(folder.job_file, {}, []).spec
    workers = spec.workers if isinstance(spec.workers, int) else spec.lanes
    progress = Progress(folder.name, short_path(folder.path), workers, spec.lanes, spec.early_stop)
    lines = _NewLines(folder)
    for event in _so_far(list(lines)):
        progress.handle(event)
    with closing(Console(screen or Screen(sys.stdout), progress)) as console:
        goes_on = True
        while goes_on:
            goes_on = is_running()  # before the look: what is told between the two must not be missed
            for line in lines:
                for event in _events(line):
                    console.handle(event)
            if goes_on:
                wait(LOOK_EVERY)


class _NewLines:
    """The whole lines of a run's events that came since the last time."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.events_file
        self._offset = 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            with opened_regular(self._file) as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # half of one: the rest is on its way
                    self._offset += len(line)
                    yield line
        except FileNotFoundError:
            return


def _so_far(lines: list[bytes]) -> Iterator[Event]:
    """What a latecomer has to know: of the steps the newest only, of which there may be millions."""
    newest = max((number for number, line in enumerate(lines) if line.startswith(_STEP)), default=-1)
    for number, line in enumerate(lines):
        if number == newest or not line.startswith(_STEP):
            yield from _events(line)


def _events(line: bytes) -> Iterator[Event]:
    try:
        event = read_event(line)
    except ValueError:
        return  # what a crash has left of one
    yield event
