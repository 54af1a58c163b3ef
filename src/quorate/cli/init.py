"""`quorate init`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.document import print_document
from quorate.cli.options import Json


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
    from quorate.cli.beginning import begin
    from quorate.cli.next_steps import print_next_steps, to_document

    beginning = begin(folder, name, force)
    if as_json:
        print_document(to_document(beginning))
    else:
        print_next_steps(beginning, sys.stdout, sys.stdout.isatty())
