"""`quorate chaos`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.completion import run_names
from quorate.cli.document import print_document
from quorate.cli.options import Epochs, JobFile, Json, Quiet, Set, Steps, Workers

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

    A fault comes when a worker begins a step, or in a phase of it: data, forward, exchange, apply, evaluation,
    checkpoint; or copy and join, when it takes up a state or meets the others after an earlier fault. If the worker is
    away or the phase does not come then, it is done at the next such moment; with `after 5ms` so much later.

    Workers are killed, stopped, made slow, asked to leave (term), cut off from the network (as root), added and
    removed; coordinator and launcher are killed. The exit code is 0 if every fault came about, both runs end with the
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
    from quorate.api import session
    from quorate.api.chaos import reference, try_under, worker_count
    from quorate.api.show import show_on_stderr, show_quietly
    from quorate.cli.chaos_view import print_trial, succeeded, to_document
    from quorate.cli.fault_options import wish_for
    from quorate.cli.overrides import overrides
    from quorate.history.ledger import read_ledger
    from quorate.spec.load import load_job
    from quorate.storage.run_folder import RunFolder

    wish = wish_for(fault, script, at_random, mtbf, seed)
    layer = overrides(settings, workers=workers, steps=steps, epochs=epochs)
    resolved = load_job(job_file, os.environ, layer)
    watch = show_quietly if quiet else show_on_stderr
    crowd = worker_count(resolved)
    undisturbed = None if against is None else reference(against, resolved)
    # What is wrong is told before anything is trained, as far as the number of steps is known.
    lanes, every = resolved.spec.lanes, resolved.spec.checkpoint.every
    if every == "epoch":  # how many steps those have is not known yet
        every = None
    has_loaders = resolved.spec.loader_workers > 0
    known_steps = resolved.spec.steps if undisturbed is None else undisturbed.steps
    wish.script(crowd, known_steps, lanes, every, has_loaders=has_loaders)
    if undisturbed is None:
        undisturbed = session.start(resolved, watch)
        _leave_if_stopped(undisturbed.status, undisturbed.exit_code, as_json)
    faults = wish.script(crowd, undisturbed.steps, lanes, every, has_loaders=has_loaders)
    trial = try_under(faults, resolved, undisturbed, watch)
    _leave_if_stopped(trial.disturbed.status, 0 if trial.failure else trial.disturbed.exit_code, as_json)
    ledger = read_ledger(RunFolder(trial.disturbed.folder))
    if as_json:
        print_document(to_document(trial, ledger))
    else:
        print_trial(trial, ledger, sys.stdout, is_terminal=sys.stdout.isatty())
    raise typer.Exit(0 if succeeded(trial, ledger) else 1)


def _leave_if_stopped(status: str, code: int, as_json: bool) -> None:
    """Of a run that was stopped there is nothing to compare."""
    if not code:
        return
    if as_json:
        print_document(
            {"status": status, "exit_code": code, "error": f"{status} before there was something to compare"}
        )
    else:
        print(status, file=sys.stderr)
    raise typer.Exit(code)
