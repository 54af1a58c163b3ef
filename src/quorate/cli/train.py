"""`quorate train`."""

import os

from quorate.cli.options import Epochs, JobFile, Json, Lanes, Quiet, Seed, Set, Steps, Workers


def train(
    job_file: JobFile,
    workers: Workers = None,
    lanes: Lanes = None,
    steps: Steps = None,
    epochs: Epochs = None,
    seed: Seed = None,
    settings: Set = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a job here.

    The job of a job file is trained in a new run folder. Ctrl-C stops it cleanly and leaves a checkpoint; a second
    Ctrl-C stops it at once. The number of workers changes how long it takes, never the result.

    \b
    Examples:
      quorate train job.yaml
      quorate train job.yaml --workers 4
      quorate train job.yaml --steps 500 --set checkpoint.every=100
    """
    from quorate.api import session
    from quorate.api.show import show_on_stderr, show_quietly
    from quorate.cli.overrides import overrides
    from quorate.cli.report import report
    from quorate.spec.load import load_job

    layer = overrides(settings, workers=workers, lanes=lanes, steps=steps, epochs=epochs, seed=seed)
    watch = show_quietly if quiet else show_on_stderr
    report(session.start(load_job(job_file, os.environ, layer), watch), as_json)
