"""Running a benchmark for somebody: measure, show, write, and leave nothing behind."""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from benchmarks.bench import Bench
from benchmarks.contest import Contest
from benchmarks.interpreters import Interpreters
from benchmarks.report import Report
from benchmarks.row import Reading
from benchmarks.script import Scripts
from benchmarks.sheet import milliseconds, print_report
from benchmarks.system import Turn
from quorate.core.errors import OutputError, RequestError
from quorate.observe.screen import Screen
from quorate.storage.atomic import write_atomically
from quorate.supervisor.signals import listening_to_signals


@dataclass(frozen=True)
class Options:
    """How it is to be measured and shown; the peers' Python is found where none is given."""

    rounds: int
    peers: Path | None = None
    output: Path | None = None
    as_json: bool = False


def run(bench: Bench, options: Options) -> int:
    """Measure and tell; the exit code of the command."""
    check_output(options.output)
    report = measure(bench, options)
    document = report.to_document()
    write_document(options.output, document)
    if options.as_json:
        print(json.dumps(document))
    else:
        print_report(Screen(sys.stdout, sys.stdout.isatty()), report, sys.stdout.isatty())
    return report.exit_code


def measure(bench: Bench, options: Options) -> Report:
    """Every system in every round, until a signal ends it; progress goes to standard error."""
    interpreters = Interpreters.find(options.peers)
    is_terminal = sys.stderr.isatty()
    with (
        listening_to_signals() as signals,
        tempfile.TemporaryDirectory(prefix="quorate-bench-", ignore_cleanup_errors=True) as folder,
        Progress(Screen(sys.stderr, is_terminal), is_terminal) as progress,
    ):
        scripts = Scripts(Path(folder), stop=lambda: signals.reason is not None)
        contest = Contest(bench, interpreters, scripts, progress.show)

        def keep(turn: Turn, readings: Sequence[Reading]) -> None:
            # As it goes: a machine that is taken away before the end must not take all figures with it.
            for reading in readings:
                progress.show(f"  {reading.system}, {reading.case}: {milliseconds(statistics.median(reading.ms))} ms")
            for absence in (each for each in contest.absences if not readings and each.what == turn.label):
                progress.show(f"  {absence.what}: {absence.reason}")
            write_document(options.output, contest.report(signals).to_document())

        contest.run(options.rounds, keep)
        return contest.report(signals)


def check_output(path: Path | None) -> None:
    """Refuse a file that could not be written, before minutes are spent on what would be lost."""
    if path is None:
        return
    if path.is_dir():
        raise RequestError(f"--output: {path} is a folder. Give the name of a file in it.")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--output: the folder {path.absolute().parent} does not exist. Make it first.")


def write_document(path: Path | None, document: dict[str, Any]) -> None:
    """Write a document, in the place of what is there."""
    if path is None:
        return
    try:
        write_atomically(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"--output: {path} could not be written: {error.strerror}.") from None


class Progress:
    """One line that changes on a terminal; a line each time in a file.

    It is drawn only when it changes, by nobody's thread: whatever draws meanwhile would be measured too.
    """

    def __init__(self, screen: Screen, is_terminal: bool) -> None:
        self._screen = screen
        self._live = Live(console=screen, auto_refresh=False, transient=True) if is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, text: str) -> None:
        """From now on, it is this."""
        if self._live is None:
            self._screen.print(Text(text), soft_wrap=True)
        else:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
