"""`quorate show`."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from quorate.cli.document import print_document
from quorate.cli.options import RUNS, Json, Run, Runs


def show(run: Run, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Show everything about a run: how it stands, its curves, its checkpoints, its job, and what to type next.

    Every value of the job is told with where it came from, and whether it changes the bits.

    Examples:

      quorate show last

      quorate show digits-0001 --json
    """
    from quorate.cli.detail_document import detail_document
    from quorate.cli.page import Page
    from quorate.cli.run_page import print_run
    from quorate.history.advice import advise
    from quorate.history.run_detail import RunDetail
    from quorate.storage.run_folder import RunFolder

    detail = RunDetail.read(RunFolder.find(runs, run))
    spec = None if detail.job is None else detail.job.spec
    advice = advise(detail.record, spec, detail.checkpoints, as_typed(detail.record.path))
    now = datetime.now(UTC)
    if as_json:
        print_document(detail_document(detail, advice, now))
    else:
        print_run(Page(sys.stdout, is_terminal=sys.stdout.isatty()), detail, advice, now)


def as_typed(path: Path) -> str:
    """A run as it is named on a command line that is typed here: by its name where that is enough."""
    from quorate.storage.runs_folder import runs_folder

    is_usual = path.parent.absolute() == runs_folder().absolute()
    return shlex.quote(path.name if is_usual else str(path))
