"""The verb `quorate top`: a running job on the terminal, and the keys that ask it for something."""

import contextlib
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.options import RUNS, Address, Json, Runs, run_names
from quorate.core.errors import QuorateError
from quorate.storage.run_folder import RunFolder

_EVERY = 0.5
"""Seconds from one look to the next."""
_FILE_WIDTH = 120
_CTRL_C = "\x03"
_ARROWS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run's name, a unique prefix of it, a path, or last. By default all running jobs.",
            show_default=False,
            autocompletion=run_names,
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the present state once and end, as without a terminal.")
    ] = False,
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Watch a running job: workers, lanes, phases, speed and losses; with keys to resize it, save and stop.

    Without RUN, the only running job is shown, or the running ones are listed to choose from. Keys: + and - change the
    number of workers, c saves a checkpoint, s stops the job (after a question), q quits and leaves the job running.

    \b
    Examples:
      quorate top
      quorate top last
      quorate top digits-0001 --once
      quorate top last --json
    """
    from quorate.api.live import LiveRun, running_jobs
    from quorate.api.ray_jobs import find_run
    from quorate.cli.runs_view import ask_ray
    from quorate.observe.screen import Screen

    folder = None if run is None else find_run(runs, run, address)
    ask_ray([] if folder is None else [folder])
    screen = Screen(sys.stdout)
    if as_json or once or not (sys.stdin.isatty() and screen.is_terminal):
        _show_once(folder, runs, screen, as_json)
        return
    with _Keyboard() as keyboard:
        if folder is None:
            running = running_jobs(runs)
            name = running[0].name if len(running) == 1 else _Choice(runs, screen, keyboard).run()
            if name is None:
                return
            folder = RunFolder.find(runs, name)
        _Watching(LiveRun(folder), screen, keyboard).run()


def _show_once(folder: RunFolder | None, runs: Path, screen: Any, as_json: bool) -> None:
    from quorate.api.live import LiveRun, running_jobs
    from quorate.cli.output import print_document
    from quorate.cli.top_view import choice_view, snapshot_view

    if as_json:
        folders = [RunFolder(record.path) for record in running_jobs(runs)] if folder is None else [folder]
        seen = [LiveRun(run).look().document() for run in folders]
        print_document({"folder": str(runs.absolute()), "running": seen} if folder is None else seen[0])
        return
    width = screen.width if screen.is_terminal else _FILE_WIDTH
    running = running_jobs(runs) if folder is None else []
    if len(running) == 1:
        folder = RunFolder(running[0].path)
    with screen.capture() as shown:
        if folder is None:
            screen.print(choice_view(running, None, datetime.now(UTC)), width=width)
        else:
            screen.print(snapshot_view(LiveRun(folder).look(), width, screen.encoding), width=width)
    # Tables fill their lines with spaces, which nobody wants in a file.
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))


class _Keyboard:
    """The keys that are pressed, one by one and at once; the terminal is as before afterwards."""

    def __enter__(self) -> "_Keyboard":
        self._number = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._number)
        changed = termios.tcgetattr(self._number)
        # Ctrl-C is a key like any other: it ends the view, and never the job.
        changed[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
        termios.tcsetattr(self._number, termios.TCSADRAIN, changed)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._number, termios.TCSADRAIN, self._before)

    def pressed(self, within: float) -> Iterator[str]:
        """The keys that are pressed within so many seconds, and nothing after that. A terminal that is gone is a q."""
        over = time.monotonic() + within
        while (left := over - time.monotonic()) > 0:
            if not select.select([self._number], [], [], left)[0]:
                return
            try:
                typed = os.read(self._number, 64).decode(errors="replace")
            except OSError:
                typed = ""
            if not typed:
                yield "q"
                return
            yield from [_ARROWS[typed]] if typed in _ARROWS else typed


class _Choice:
    """All running jobs, of which one is chosen."""

    def __init__(self, runs: Path, screen: Any, keyboard: _Keyboard) -> None:
        self._runs = runs
        self._screen = screen
        self._keyboard = keyboard
        self._at = 0

    def run(self) -> str | None:
        """The name of the one that is chosen; None for none."""
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        from quorate.api.live import running_jobs
        from quorate.cli.top_view import CHOICE_KEYS, choice_view

        with Live(console=self._screen, screen=True, auto_refresh=False) as live:
            while True:
                running = running_jobs(self._runs)
                self._at = max(0, min(self._at, len(running) - 1))
                view = choice_view(running, self._at, datetime.now(UTC))
                live.update(Group(view, Text(), Text(CHOICE_KEYS, style="dim")), refresh=True)
                for key in self._keyboard.pressed(_EVERY):
                    if key in ("q", _CTRL_C):
                        return None
                    if key in ("\n", "\r") and running:
                        return running[self._at].name
                    self._at += {"down": 1, "j": 1, "up": -1, "k": -1}.get(key, 0)
                    break


class _Watching:
    """One job, looked at twice a second. What is asked of it is asked beside, so that the view goes on."""

    def __init__(self, live: Any, screen: Any, keyboard: _Keyboard) -> None:
        self._live = live
        self._screen = screen
        self._keyboard = keyboard
        self._said = ""
        self._is_asking = False
        self._busy: threading.Thread | None = None

    def run(self) -> None:
        """Until somebody quits."""
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        from quorate.cli.top_view import KEYS, is_over, snapshot_view

        seen = self._live.look()
        with Live(console=self._screen, screen=True, auto_refresh=False) as live:
            while True:
                over = is_over(seen)
                keys = "q  quit" if over else KEYS
                footer = [Text(), Text(self._said, style="yellow"), Text(keys, style="dim")]
                view = snapshot_view(seen, self._screen.width, self._screen.encoding)
                live.update(Group(view, *footer), refresh=True)
                if not all(self._take(key, seen, over) for key in self._keyboard.pressed(_EVERY)):
                    break
                seen = self._live.look()
        # What was seen last stays on the screen.
        self._screen.print(snapshot_view(seen, self._screen.width, self._screen.encoding))

    def _take(self, key: str, seen: Any, over: bool) -> bool:
        """Do what a key asks for; False to quit."""
        if self._is_asking:
            self._is_asking = False
            self._said = ""
            if key in ("y", "Y"):
                self._ask("stopping after the running step, which is saved", lambda: _stop(self._live.run))
            return True
        if key in ("q", _CTRL_C):
            return False
        if over:
            return True
        if key in ("+", "=", "-", "_"):
            self._resize(seen, 1 if key in ("+", "=") else -1)
        elif key == "c":
            self._ask("saving a checkpoint", lambda: _save(self._live.run))
        elif key == "s":
            self._is_asking = True
            self._said = f"stop {seen.record.name}, with a checkpoint? y / n"
        return True

    def _resize(self, seen: Any, more: int) -> None:
        from quorate.api.control import resize

        workers, run = max(1, (seen.wanted or sum(bool(each.lanes) for each in seen.workers)) + more), self._live.run

        def ask() -> str:
            resize(run, workers)
            return f"continuing with {workers} workers from the next step boundary"

        self._ask(f"asking for {workers} workers", ask)

    def _ask(self, meanwhile: str, ask: Callable[[], str]) -> None:
        if self._busy is not None and self._busy.is_alive():
            self._said = "please wait: the last request is not done yet"
            return
        self._said = f"{meanwhile} ..."

        def work() -> None:
            try:
                self._said = ask()
            except QuorateError as error:
                self._said = error.message

        self._busy = threading.Thread(target=work, daemon=True)
        self._busy.start()


def _save(run: RunFolder) -> str:
    from quorate.api.control import save

    return f"saved {save(run).path.name}"


def _stop(run: RunFolder) -> str:
    from quorate.api.control import ask_to_end

    if not ask_to_end(run):
        return f"its coordinator does not answer right now: quorate stop {run.name}"
    return "stopping after the running step, which is saved"
