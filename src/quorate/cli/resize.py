"""`quorate resize`."""

from typing import Annotated

import typer

from quorate.cli.document import print_document
from quorate.cli.options import RUNS, Json, Run, Runs


def resize(
    run: Run,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="How many workers the job shall have from now on.")
    ],
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Have a running job go on with more or fewer workers, to the same bits.

    The change comes at a step boundary: nobody restarts, and no step is lost.

    \b
    Examples:
      quorate resize last --workers 4
      quorate resize digits-0001 --workers 1
    """
    from quorate.api import control

    folder = control.resize(runs, run, workers)
    if as_json:
        print_document({"run": folder.name, "workers": workers})
    else:
        typer.echo(f"{folder.name} goes on with {workers} worker{'s' if workers > 1 else ''}.")
