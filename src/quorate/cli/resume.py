"""`quorate resume`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.options import Epochs, Json, Lanes, Seed, Set, Steps, Workers, overrides


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, a unique prefix of it, a path, or last.")],
    workers: Workers = None,
    lanes: Lanes = None,
    steps: Steps = None,
    epochs: Epochs = None,
    seed: Seed = None,
    settings: Set = None,
    runs: Annotated[Path, typer.Option(help="The folder of run folders.")] = Path("runs"),
    branch: Annotated[
        bool, typer.Option("--branch", help="Start a new run from the checkpoint, with changed keys.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Go on from a run's newest whole checkpoint, on any number of workers.

    Example: quorate resume last --workers 4
    """
    from quorate.api import session
    from quorate.api.train import show_on_stderr
    from quorate.cli.report import report

    layer = overrides(settings, workers=workers, lanes=lanes, steps=steps, epochs=epochs, seed=seed)
    report(session.resume(runs, run, os.environ, layer, watch=show_on_stderr, branch=branch), as_json)
