"""Running a benchmark for somebody: measure, show, write, and leave nothing behind."""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.contest import Contest
from benchmarks.document import check_output, write_document
from benchmarks.interpreters import Interpreters
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.script import Scripts
from benchmarks.sheet import print_report
from quorate.observe.screen import Screen
from quorate.supervisor.signals import listening_to_signals


@dataclass(frozen=True)
class Wishes:
    """How it is to be measured and told; the peers' Python is found where none is given."""

    rounds: int
    peers: Path | None = None
    output: Path | None = None
    as_json: bool = False


def run(bench: Bench, wishes: Wishes) -> int:
    """Measure and tell; the exit code of the command."""
    check_output(wishes.output)
    report = measure(bench, wishes)
    document = report.to_document()
    write_document(wishes.output, document)
    if wishes.as_json:
        print(json.dumps(document))
    else:
        print_report(Screen(sys.stdout, sys.stdout.isatty()), report, sys.stdout.isatty())
    return report.exit_code


def measure(bench: Bench, wishes: Wishes) -> Report:
    """Every system in every round, until a signal ends it; progress goes to standard error."""
    interpreters = Interpreters.find(wishes.peers)
    is_terminal = sys.stderr.isatty()
    with (
        listening_to_signals() as signals,
        tempfile.TemporaryDirectory(prefix="quorate-bench-", ignore_cleanup_errors=True) as folder,
        Progress(Screen(sys.stderr, is_terminal), is_terminal) as progress,
    ):
        scripts = Scripts(Path(folder), stop=lambda: signals.reason is not None)
        contest = Contest(bench, interpreters, scripts, progress.tell)
        contest.run(wishes.rounds)
        return contest.report(signals)
