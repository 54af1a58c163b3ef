"""`quorate doctor`."""

import os
import sys
from typing import Annotated

import typer

from quorate.cli.completion import run_names
from quorate.cli.document import print_document
from quorate.cli.options import RUNS, Json, Runs

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Look at the coordinator of this run only: a name, a unique prefix of it, a path, or last.",
        show_default=False,
        autocompletion=run_names,
    ),
]


def doctor(run: Run = None, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Tell what is installed, usable and reachable here.

    Each line says how something is, and what to do about it if it is not well. Without RUN, the coordinator of every
    running job in the folder of runs is called. The exit code is 1 if there is a problem, and 0 otherwise.

    \b
    Examples:
      quorate doctor
      quorate doctor last
      quorate doctor --json
    """
    from quorate.doctor.checkup import Subject, checks_of
    from quorate.doctor.checkup import examine
    from quorate.doctor.report import exit_code, to_document
    from quorate.doctor.report import Sheet
    from quorate.storage.run_folder import RunFolder

    patient = None if run is None else RunFolder.find(runs, run)
    found = examine(checks_of(Subject(runs, os.environ, patient)))
    if as_json:
        findings = list(found)
        print_document(to_document(findings))
    else:
        findings = Sheet(sys.stdout, sys.stdout.isatty()).show(found)
    raise typer.Exit(exit_code(findings))
