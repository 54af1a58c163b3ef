"""The verbs before a first job: `quorate init` and `quorate doctor`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.options import RUNS, Json, Runs, run_names
from quorate.cli.output import print_document


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to write them; it is made if it is not there.")
    ] = Path(),
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the job. By default that of the folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there already.")] = False,
    as_json: Json = False,
) -> None:
    """Write a first job file and task, to change into your own.

    The task trains as it is, in seconds: job.yaml names every key of a job, task.py has a model, data, a loss, an
    optimizer and metrics. Nothing is ever replaced without --force.

    \b
    Examples:
      quorate init
      quorate init circles
      quorate init circles --name first-try --force
    """
    from quorate.cli.scaffold import show_scaffold, write_scaffold

    show_scaffold(write_scaffold(folder, name, force), as_json)


def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Look at the coordinator of this run only: a name, a unique prefix of it, a path, or last.",
            show_default=False,
            autocompletion=run_names,
        ),
    ] = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show what is installed, usable and reachable here.

    Each line says how something is, and what to do about it if it is not well. Without RUN, the coordinator of every
    running job in the folder of runs is called. The exit code is 1 if there is a problem, and 0 otherwise.

    \b
    Examples:
      quorate doctor
      quorate doctor last
      quorate doctor --json
    """
    from quorate.doctor.checkup import Subject, checks_of, examine
    from quorate.doctor.report import exit_code, print_findings, to_document
    from quorate.storage.run_folder import RunFolder

    subject = Subject(runs, os.environ, None if run is None else RunFolder.find(runs, run))
    found = examine(checks_of(subject))
    if as_json:
        findings = list(found)
        print_document(to_document(findings))
    else:
        findings = print_findings(found, sys.stdout, sys.stdout.isatty())
    raise typer.Exit(exit_code(findings))
