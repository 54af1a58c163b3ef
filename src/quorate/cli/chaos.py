"""`quorate chaos`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.options import Epochs, JobFile, Json, Quiet, Set, Steps, Workers, overrides, run_names
from quorate.cli.output import print_document

Faults = Annotated[
    list[str] | None,
    typer.Option("--fault", metavar="FAULT", help='Such as "kill worker 1 at step 20". Repeatable.'),
]
Script = Annotated[Path | None, typer.Option(metavar="FILE", help="A file of faults, one a line; # begins a comment.")]
AtRandom = Annotated[bool, typer.Option("--random", help="Faults at random; --mtbf and --seed say which.")]
Mtbf = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="With --random: mean time between two faults, such as 20steps or 5s (a step counts for 50 ms).",
    ),
]
Chance = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="With --random: the same number gives the same faults.")
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="A complete run of the job to compare with, instead of running it undisturbed.",
        autocompletion=run_names,
    ),
]


def chaos(
    job_file: JobFile,
    fault: Faults = None,
    script: Script = None,
    at_random: AtRandom = False,
    mtbf: Mtbf = None,
    seed: Chance = None,
    against: Against = None,
    workers: Workers = None,
    steps: Steps = None,
    epochs: Epochs = None,
    settings: Set = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a job under faults, and compare the bits with the undisturbed run.

    A fault fires when a worker begins a step, or in a phase of it: data, forward, exchange, apply, evaluation,
    checkpoint; or copy and join, when it copies a state or joins the others after an earlier fault. If the worker is
    away or the phase does not come then, it fires at the next such moment; with `after 5ms` so much later.

    Workers are killed, stopped, made slow, asked to leave (term), cut off from the network (as root), added and
    removed; coordinator and launcher are killed. The exit code is 0 if every fault fired, both runs end with the
    same weights, and every sample was used exactly once an epoch, otherwise 1.

    \b
    Examples:
      quorate chaos job.yaml --fault "kill worker 1 at step 20"
      quorate chaos job.yaml --fault "stop worker 0 at step 15 for 3s"
      quorate chaos job.yaml --fault "kill worker 1 at step 9 in exchange"
      quorate chaos job.yaml --fault "kill worker 1 at step 9 after 5ms"
      quorate chaos job.yaml --fault "slow worker 1 4x from step 10"
      quorate chaos job.yaml --fault "kill all at step 40" --against last
      quorate chaos job.yaml --fault "kill coordinator at step 30"
      quorate chaos job.yaml --fault "kill launcher at step 40 in checkpoint"
      quorate chaos job.yaml --fault "term worker 1 at step 5"
      quorate chaos job.yaml --fault "add worker at step 12"
      quorate chaos job.yaml --fault "cut worker 2 at step 10 for 8s"
      quorate chaos job.yaml --random --mtbf 5s --seed 7
    """
    from quorate.api.chaos import FaultRequest, Stopped, try_under
    from quorate.api.train import show_on_stderr, show_quietly
    from quorate.cli.chaos_view import show_trial
    from quorate.spec.load import load_job

    request = FaultRequest.of(fault, script, at_random, mtbf, seed)
    layer = overrides(settings, workers=workers, steps=steps, epochs=epochs)
    resolved = load_job(job_file, os.environ, layer)
    trial = try_under(request, resolved, against, show_quietly if quiet else show_on_stderr)
    if isinstance(trial, Stopped):
        if as_json:
            error = f"{trial.status} before there was something to compare"
            print_document({"status": trial.status, "exit_code": trial.exit_code, "error": error})
        else:
            print(trial.status, file=sys.stderr)
        raise typer.Exit(trial.exit_code)
    raise typer.Exit(0 if show_trial(trial, as_json) else 1)
