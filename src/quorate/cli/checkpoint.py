"""`quorate checkpoint`."""

from typing import Annotated

import typer

from quorate.cli.document import print_document
from quorate.cli.options import RUNS, Json, Run, Runs


def checkpoint(
    run: Run,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long to wait until it is saved.")
    ] = 300.0,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Have a running job save a checkpoint now, and go on.

    It is saved at the next step boundary, beside the training. The command ends when it is whole, on the disk.

    \b
    Examples:
      quorate checkpoint last
      quorate checkpoint digits-0001 --timeout 600
    """
    from quorate.api import control
    from quorate.observe.quantities import size

    saved = control.save(runs, run, timeout)
    name = saved.path.absolute().parents[1].name
    if as_json:
        fields = {
            "run": name,
            "checkpoint": str(saved.path.absolute()),
            "step": saved.cursor.step,
            "bytes": saved.bytes,
            "weights_digest": saved.manifest.weights_digest,
        }
        print_document(fields)
    else:
        typer.echo(f"{name} has saved {saved.path.name}: {size(saved.bytes)} at step {saved.cursor.step:,}.")
