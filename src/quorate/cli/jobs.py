"""The verbs that train, resume and evaluate, try a job under faults, and ask a running one for something."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.options import (
    RUNS,
    Address,
    Averaged,
    Epochs,
    JobFile,
    Json,
    Lanes,
    NewRuns,
    Quiet,
    Run,
    Runs,
    Seed,
    Set,
    Steps,
    Task,
    Workers,
    choose,
    overrides,
    run_names,
)
from quorate.cli.output import print_answer, print_document
from quorate.core.errors import OutputError, RequestError
from quorate.observe.quantities import size
from quorate.storage.run_folder import RunFolder

Faults = Annotated[
    list[str] | None,
    typer.Option("--fault", metavar="FAULT", help='Such as "kill worker 1 at step 20". Repeatable.'),
]
Script = Annotated[Path | None, typer.Option(metavar="FILE", help="A file with one fault per line; # is a comment.")]
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


Print = Annotated[
    str | None,
    typer.Option(
        "--print",
        metavar="WHOSE",
        help="Show what the task prints in the worker of the first lane (first), in all, or none.",
        show_default="first",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Submit it to the job's Ray cluster, and end at once; the job continues there.")
]


def train(
    job_file: JobFile,
    workers: Workers = None,
    lanes: Lanes = None,
    steps: Steps = None,
    epochs: Epochs = None,
    seed: Seed = None,
    settings: Set = None,
    runs: NewRuns = None,
    detach: Detach = False,
    prints: Print = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a job here, or on its cluster.

    The job is trained in a new run folder. Ctrl-C stops it cleanly and leaves a checkpoint; a second Ctrl-C stops it at
    once. The number of workers changes how long it takes, never the result.

    With --detach it is submitted to its Ray cluster (engine: ray, with engine.storage) and continues without this
    command. `quorate logs -f`, `show`, `top`, `resize` and `stop` find it by its name: here, and from any machine that
    has the storage, by RAY_ADDRESS or --address.

    \b
    Examples:
      quorate train job.yaml
      quorate train job.yaml --workers 4
      quorate train job.yaml --steps 500 --set checkpoint.every=100
      quorate train job.yaml --detach
    """
    from quorate.api import session
    from quorate.spec.load import load_job

    layer = overrides(settings, workers=workers, lanes=lanes, steps=steps, epochs=epochs, seed=seed, runs=runs)
    if detach:
        from quorate.api.detached import submit

        _tell_submitted(*submit(load_job(job_file, os.environ, layer)), as_json)
        return
    watch = _display(quiet, prints)
    report(session.start(load_job(job_file, os.environ, layer), watch), as_json)


def _display(is_quiet: bool, prints: str | None) -> Any:
    """How a job is shown: what is said about its prints goes over --quiet."""
    from quorate.api.train import show_on_stderr, show_quietly
    from quorate.observe.live import Prints

    show = show_quietly if is_quiet else show_on_stderr
    return show if prints is None else partial(show, prints=choose(prints, Prints, "--print"))


def _tell_submitted(run: Any, submission: Any, as_json: bool) -> None:
    fields = {"run": run.name, "folder": str(run.path), "status": "submitted", "submission": submission.id}
    told = f"{run.name} is submitted to Ray, and is kept in {run.path}.\nnext: quorate logs -f {run.name}"
    print_answer(as_json, fields, told)


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
        bool, typer.Option("--trust-source", help="Run the task's source that is stored with a copy of the run.")
    ] = False,
    detach: Detach = False,
    prints: Print = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Resume a run from its newest valid checkpoint.

    On any number of workers it ends with the bits that it would have had undisturbed. Keys that only say how a job runs
    may be changed, and it may be made longer; what changes its meaning needs --branch, which starts a new run.

    A task that is not where it was is looked for relative to the run; without it, the source that the run keeps is
    used. Only its code counts: a run resumes after a changed comment, and not after a changed line.

    A run of which only a copy is at hand (see checkpoint.to), on another disk or in a store, is fetched first. The task
    is the one here, or that of --task. Its source that lies beside the copy is run only where the run's key vouches for
    it, or with --trust-source: it is code of whoever can write there.

    With --detach it is submitted to its Ray cluster, as with `train`. The run has to be in engine.storage, where
    detached runs are.

    \b
    Examples:
      quorate resume last
      quorate resume digits-0001 --workers 4
      quorate resume last --branch --set params.learning_rate=0.05
      quorate resume s3://bucket/prefix/digits-0001
      quorate resume digits-0001 --detach
    """
    from quorate.api import session

    layer = overrides(settings, workers=workers, lanes=lanes, steps=steps, epochs=epochs, seed=seed, task=task)
    if detach:
        from quorate.api.detached import submit_resume

        if branch or trust_source:
            raise RequestError("--detach resumes a run as it is: it does not go with --branch or --trust-source.")
        _tell_submitted(*submit_resume(runs, run, os.environ, layer), as_json)
        return
    watch = _display(quiet, prints)
    result = session.resume(runs, run, os.environ, layer, watch=watch, branch=branch, trust_source=trust_source)
    report(result, as_json)


def evaluate(
    run: Run,
    checkpoint: Annotated[str, typer.Option(metavar="WHICH", help="last, best, or a step.")] = "last",
    averaged: Averaged = None,
    workers: Workers = None,
    task: Task = None,
    settings: Set = None,
    prints: Print = "first",
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Evaluate a run's checkpoint on the validation set. The run itself stays as it is.

    The result has the same bits on any number of workers. With --set params.… the task may read other data.

    \b
    Examples:
      quorate eval last
      quorate eval digits-0001 --checkpoint best --workers 2
    """
    from quorate.api.evaluate import evaluate_run
    from quorate.observe.screen import Screen
    from quorate.observe.summary import print_summary

    layer = overrides(settings, workers=workers, task=task)
    watch = _display(True, prints)
    done = evaluate_run(runs, run, checkpoint, os.environ, layer, averaged=averaged, watch=watch)
    if as_json:
        fields = {
            "run": done.run,
            "checkpoint": str(done.checkpoint),
            "step": done.step,
            "averaged": done.averaged,
            "metrics": done.metrics,
            "weights_digest": done.weights_digest,
        }
        print_document(fields)
        return
    summary = {
        "run": done.run,
        "status": f"at step {done.step:,}" + (", averaged weights" if done.averaged else ""),
        "final_metrics": done.metrics,
        "weights_digest": done.weights_digest,
    }
    print_summary(summary, Screen(sys.stdout))


def resize(
    run: Run,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="The new number of workers."),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option("--servers", metavar="N", min=1, help="The new number of parameter servers."),
    ] = None,
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Change the number of workers or parameter servers of a running job, to the same bits.

    The change comes at a step boundary: no process restarts, and no step is lost. A server that leaves hands over what
    it holds first.

    \b
    Examples:
      quorate resize last --workers 4
      quorate resize digits-0001 --workers 1
      quorate resize last --servers 3
    """
    from quorate.api import control
    from quorate.api.ray_jobs import find_run

    asked = {"worker": workers, "server": servers}
    if workers is None and servers is None:
        raise RequestError("resize needs a target: add --workers N, --servers N, or both.")
    folder = control.resize(find_run(runs, run, address), workers, servers)
    numbers = " and ".join(f"{count} {what}{'s' if count > 1 else ''}" for what, count in asked.items() if count)
    fields = {f"{what}s": count for what, count in asked.items() if count}
    print_answer(as_json, {"run": folder.name, **fields}, f"{folder.name} continues with {numbers}.")


def checkpoint(
    run: Run,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long to wait until it is saved.")
    ] = 300.0,
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Have a running job save a checkpoint now.

    It is saved at the next step boundary, while training goes on. The command ends when it is complete on the disk.

    \b
    Examples:
      quorate checkpoint last
      quorate checkpoint digits-0001 --timeout 600
    """
    from quorate.api import control
    from quorate.api.ray_jobs import find_run

    saved = control.save(find_run(runs, run, address), timeout)
    name = saved.path.absolute().parents[1].name
    fields = {
        "run": name,
        "checkpoint": str(saved.path.absolute()),
        "step": saved.cursor.step,
        "bytes": saved.bytes,
        "weights_digest": saved.manifest.weights_digest,
    }
    sentence = f"{name} has saved {saved.path.name}: {size(saved.bytes)} at step {saved.cursor.step:,}."
    print_answer(as_json, fields, sentence)


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the step and for the save.")] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long to wait until it has ended.")
    ] = 300.0,
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """End a running job cleanly: it completes its step and saves, as with Ctrl-C.

    The command ends when the job has. With --now nothing more is saved; the checkpoints so far are kept. The exit code
    is 0 when the job has ended, 1 if it does not in time, and 2 if it was not running.

    \b
    Examples:
      quorate stop last
      quorate stop digits-0001 --now
    """
    from quorate.api import control
    from quorate.api.ray_jobs import find_run
    from quorate.api.result import open_run

    folder = control.stop(find_run(runs, run, address), now=now, patience=min(timeout, 30.0) if now else timeout)
    result = open_run(folder.path)
    sentence = f"{result.run} is {result.status}, with its newest checkpoint at step {result.steps:,}."
    if result.status == "complete":
        sentence = f"{result.run} was complete before it could be stopped, after {result.steps:,} steps."
    print_answer(as_json, {"run": result.run, "status": result.status, "steps": result.steps}, sentence)


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
    runs: NewRuns = None,
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
    from quorate.api.chaos import FaultRequest, Trial, try_under
    from quorate.api.train import show_on_stderr, show_quietly
    from quorate.cli.chaos_view import show_trial
    from quorate.spec.load import load_job

    request = FaultRequest.of(fault, script, at_random, mtbf, seed)
    layer = overrides(settings, workers=workers, steps=steps, epochs=epochs, runs=runs)
    resolved = load_job(job_file, os.environ, layer)
    trial = try_under(request, resolved, against, show_quietly if quiet else show_on_stderr)
    if not isinstance(trial, Trial):
        if as_json:
            error = f"{trial.status} before there was something to compare"
            print_document({"status": trial.status, "exit_code": trial.exit_code, "error": error})
        else:
            print(trial.status, file=sys.stderr)
        raise typer.Exit(trial.exit_code)
    raise typer.Exit(0 if show_trial(trial, as_json) else 1)


def report(result: Any, as_json: bool) -> None:
    """Print the `Result` of a job, with what to do next if it did not complete, and end the command."""
    from quorate.api.recorded_run import remains_of
    from quorate.cli.errors import show_next
    from quorate.observe.screen import Screen
    from quorate.observe.summary import print_summary
    from quorate.spec.load import load_recorded

    run = RunFolder(result.folder)
    try:
        if as_json:
            print_document(result.fields)
        else:
            print_summary(result.fields, Screen(sys.stdout))
        sys.stdout.flush()
    except OutputError as error:
        # A job that was stopped because its terminal is gone has nobody to tell, and its exit code says more.
        if not result.exit_code:
            raise OutputError(f"{error.message} The result is in {run.result_file}.") from None
    if result.exit_code:
        show_next(remains_of(run, load_recorded(run.job_file, {}, []).spec))
    raise typer.Exit(result.exit_code)
