"""`quorate resume`."""

import os
from typing import Annotated

import typer

from quorate.cli.options import RUNS, Epochs, Json, Lanes, Quiet, Run, Runs, Seed, Set, Steps, Task, Workers


def resume(
    run: Run,
    workers: Workers = None,
    lanes: Lanes = None,
    steps: Steps = None,
    epochs: Epochs = None,
    seed: Seed = None,
    task: Task = None,
    settings: Set = None,
    runs: Runs = RUNS,
    branch: Annotated[
        bool, typer.Option("--branch", help="Start a new run from the checkpoint, with changed keys.")
    ] = False,
    trust_source: Annotated[
        bool, typer.Option("--trust-source", help="Run the task's source that lies beside a copy of the run.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on from a run's newest whole checkpoint.

    On any number of workers it ends with the bits that it would have had undisturbed. Keys that only say how a job runs
    may be changed, and it may be made longer; what changes its meaning needs --branch, which starts a new run.

    A task that is not where it was is looked for relative to the run; without it, the source that the run keeps is
    used. What counts of it is the code: a run goes on after a changed comment, and not after a changed line.

    A run of which only a copy is at hand (see checkpoint.to), on another disk or on a store, is fetched first. The task
    is the one here, or that of --task. Its source that lies beside the copy is run only where the run's key vouches for
    it, or with --trust-source: it is code of whoever can write there.

    \b
    Examples:
      quorate resume last
      quorate resume digits-0001 --workers 4
      quorate resume last --branch --set params.learning_rate=0.05
      quorate resume s3://bucket/prefix/digits-0001
    """
    from quorate.api import session
    from quorate.api.show import show_on_stderr, show_quietly
    from quorate.cli.overrides import overrides
    from quorate.cli.report import report

    layer = overrides(settings, workers=workers, lanes=lanes, steps=steps, epochs=epochs, seed=seed, task=task)
    watch = show_quietly if quiet else show_on_stderr
    result = session.resume(runs, run, os.environ, layer, watch=watch, branch=branch, trust_source=trust_source)
    report(result, as_json)
