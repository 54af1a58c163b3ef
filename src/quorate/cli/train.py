"""`quorate train`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.options import Epochs, Json, Lanes, Seed, Set, Steps, Workers, overrides


def train(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    workers: Workers = None,
    lanes: Lanes = None,
    steps: Steps = None,
    epochs: Epochs = None,
    seed: Seed = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Run a job here. Ctrl-C stops it cleanly and leaves a checkpoint; twice stops it at once.

    Example: quorate train examples/digits.yaml --workers 2
    """
    from quorate.api import session
    from quorate.api.train import show_on_stderr
    from quorate.cli.report import report
    from quorate.spec.load import load_job

    layer = overrides(settings, workers=workers, lanes=lanes, steps=steps, epochs=epochs, seed=seed)
    report(session.start(load_job(job_file, os.environ, layer), show_on_stderr), as_json)
