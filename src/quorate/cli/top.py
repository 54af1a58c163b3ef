"""The verb `quorate top`: a running job on the terminal."""

import signal
import sys
import threading
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from quorate.cli.options import RUNS, Address, Json, Runs, find_run, run_names
from quorate.storage.run_folder import RunFolder

_EVERY = 0.5
"""Seconds from one look to the next."""
_FILE_WIDTH = 120


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run's name, a unique prefix of it, a path, or last. By default all running jobs.",
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
    """Watch a running job: workers, lanes, phases, speed and losses.

    Without RUN, the only running job is shown, or the running ones are listed. Ctrl-C ends the view and leaves the job
    running; quorate resize, checkpoint and stop ask it for something.

    \b
    Examples:
      quorate top
      quorate top last
      quorate top digits-0001 --once
      quorate top last --json
    """
    from quorate.cli.output import print_document
    from quorate.cli.runs_view import ask_ray
    from quorate.cli.top_view import LiveRun, list_view, running_jobs, snapshot_view
    from quorate.observe.screen import Screen

    folder = None if run is None else find_run(runs, run, address)
    ask_ray([] if folder is None else [folder])
    running = running_jobs(runs) if folder is None else []
    if as_json:
        folders = [RunFolder(record.path) for record in running] if folder is None else [folder]
        seen = [LiveRun(run).look().document() for run in folders]
        print_document({"folder": str(runs.absolute()), "running": seen} if folder is None else seen[0])
        return
    if len(running) == 1:
        folder = RunFolder(running[0].path)
    screen = Screen(sys.stdout)
    if folder is not None and screen.is_terminal and not once:
        _watch(LiveRun(folder), screen)
        return
    width = screen.width if screen.is_terminal else _FILE_WIDTH
    with screen.capture() as shown:
        view = list_view(running, datetime.now(UTC))
        if folder is not None:
            view = snapshot_view(LiveRun(folder).look(), width, screen.encoding)
        screen.print(view, width=width)
    # Tables fill their lines with spaces, which nobody wants in a file.
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))


def _watch(live: Any, screen: Any) -> None:
    """Look at a job twice a second until it has ended or somebody has seen enough."""
    from rich.live import Live

    from quorate.cli.top_view import is_over, snapshot_view

    enough = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: enough.set())  # it ends the view, and never the job
    seen = live.look()
    with Live(console=screen, screen=True, auto_refresh=False) as view:
        while not is_over(seen):
            view.update(snapshot_view(seen, screen.width, screen.encoding), refresh=True)
            if enough.wait(_EVERY):
                break
            seen = live.look()
    # What was seen last stays on the screen.
    screen.print(snapshot_view(seen, screen.width, screen.encoding))
