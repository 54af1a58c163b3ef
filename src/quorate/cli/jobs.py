"""The verbs that train, resume and evaluate, and ask a running job for something."""

import os
import sys
from dataclasses import asdict
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
    TrustJob,
    Which,
    Workers,
    choose,
    find_run,
    job_of,
    overrides,
    to_file,
)
from quorate.cli.output import print_answer, print_document
from quorate.core.errors import OutputError, RequestError
from quorate.observe.quantities import size
from quorate.storage.run_folder import RunFolder

Print = Annotated[
    str | None,
    typer.Option(
        "--print",
        metavar="WHOSE",
        help="Whose prints and logs to show: first (of the first lane), all, or none.",
        show_default="first",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Submit the job to its Ray cluster and return at once; it continues there.")
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
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train anyway, also if the job says `reuse: true` and its result is known.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Run one worker in this process, for breakpoint() and debuggers.")
    ] = False,
    prints: Print = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a job on this machine or on a Ray cluster.

    The job is trained in a new run folder. Ctrl-C completes the running step, saves a checkpoint and stops; a second
    Ctrl-C stops at once. The number of workers changes how long it takes, never the result.

    With --detach the job is submitted to its Ray cluster (engine: ray, with engine.storage) and continues without this
    command. `quorate logs -f`, `show`, `top`, `resize` and `stop` find the run by its name, also on other machines
    that have the storage mounted: with RAY_ADDRESS or --address.

    With --debug a single worker runs in this process, to the same bits: breakpoint(), pdb and debuggers work in the
    task. `q` or Ctrl-D at the prompt ends the job and keeps its checkpoints.

    \b
    Examples:
      quorate train job.yaml
      quorate train job.yaml --workers 4
      quorate train job.yaml --steps 500 --set checkpoint.every=100
      quorate train job.yaml --detach
      quorate train job.yaml --debug
    """

    if debug and (detach or as_json):
        raise RequestError(f"--debug needs this terminal, and {'--detach' if detach else '--json'} does without it.")

    flags = {"workers": workers, "lanes": lanes, "steps": steps, "epochs": epochs, "seed": seed, "runs": runs}
    resolved = job_of(job_file, [*(settings or ()), *(["reuse=false"] if fresh else ())], **flags)
    if detach:
        from quorate.api.detached import submit

        _tell_submitted(*submit(resolved), as_json)
        return
    watch = _display(quiet, prints, is_live=not debug)
    if debug:
        from quorate.api.debug import restart_as_worker, start_here

        restart_as_worker()
        result = start_here(resolved, watch)
    else:
        from quorate.api.known_results import start

        result = start(resolved, watch)
    report(result, as_json)


def _display(is_quiet: bool, prints: str | None, *, is_live: bool = True) -> Any:
    """How a job is shown: what is said about its prints goes over --quiet. Without a bar unless it `is_live`."""
    from quorate.api.train import show_lines, show_on_stderr, show_quietly
    from quorate.observe.sinks import Prints

    show = show_quietly if is_quiet else show_on_stderr if is_live else show_lines
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
    trust_job: Annotated[
        bool,
        typer.Option(
            "--trust-job",
            help="Use the callbacks, commands, addresses and destinations that the job of a copy names, or that of a "
            "run given by its path where others can write.",
        ),
    ] = False,
    detach: Detach = False,
    prints: Print = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Resume a run from its newest valid checkpoint.

    The run ends with the same bits as an undisturbed one, on any number of workers. Keys that affect only how a job
    runs may change, and epochs or steps may be added. Changing a key that affects results needs --branch, which starts
    a new run.

    If the task has moved, it is looked for relative to the run; if it is gone, the copy of its source in the run folder
    is used. Changed code of the task is refused; comments, formatting and docstrings do not count.

    RUN may be a copy of a run on another disk or in an object store (see checkpoint.to), which is fetched first.
    Anybody who can write to that place could have changed it. So the task is the one in the working folder, or that of
    --task; the source that is stored with the copy is run only if your key authenticates it, or with --trust-source.
    What the job of the copy names (callbacks, notify, track, engine, further places of checkpoint.to) is used only with
    --trust-job, or if you give it by --set. The key of encrypted checkpoints is always yours to give.

    A run that is given by its path, outside the folder of runs, is resumed only if nobody else can write to it or to
    the folder around it, or with --trust-job. If you give its key by --set, its job is that of its newest checkpoint.

    With --detach the run is submitted to its Ray cluster, as with `train`. It has to be stored in engine.storage, as
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
        _tell_submitted(*submit_resume(runs, run, os.environ, layer, trust_job=trust_job), as_json)
        return
    resume_run = partial(session.resume, runs, run, os.environ, layer, watch=_display(quiet, prints))
    report(resume_run(branch=branch, trust_source=trust_source, trust_job=trust_job), as_json)


def evaluate(
    run: Run,
    checkpoint: Which = "last",
    averaged: Averaged = None,
    test: Annotated[bool, typer.Option("--test", help="Evaluate on the test set, the third of datasets().")] = False,
    workers: Workers = None,
    task: Task = None,
    settings: Set = None,
    trust_job: TrustJob = False,
    prints: Print = "first",
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Evaluate a run's checkpoint on the validation set. The run is not changed.

    The result has the same bits on any number of workers. Use --set params.… to evaluate on other data, if the task
    has a param for it.

    \b
    Examples:
      quorate eval last
      quorate eval digits-0001 --checkpoint best --workers 2
      quorate eval last --test
    """
    from quorate.api.evaluate import Asked, evaluate_run
    from quorate.observe.screen import Screen, print_summary

    layer = overrides(settings, workers=workers, task=task)
    asked = Asked(runs, run, checkpoint, os.environ, layer, trust_job, _display(True, prints))
    done = evaluate_run(asked, averaged, "test" if test else "")
    if as_json:
        print_document(asdict(done) | {"checkpoint": str(done.checkpoint)})
        return
    summary = {
        "run": done.run,
        "status": f"at step {done.step:,}" + (", averaged weights" if done.averaged else ""),
        "final_metrics": done.metrics,
        "weights_digest": done.weights_digest,
    }
    print_summary(summary, Screen(sys.stdout))


def predict(
    run: Run,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="train, validation, test, or a function: file.py:function.")
    ],
    output: Annotated[Path, to_file("The file to write: .jsonl or .parquet.")],
    checkpoint: Which = "last",
    averaged: Averaged = None,
    workers: Workers = None,
    task: Task = None,
    settings: Set = None,
    trust_job: TrustJob = False,
    prints: Print = "first",
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Write what the task's predict(model, batch) gives of every sample of a dataset, in order.

    DATA is one of the sets that datasets() gives, or a function that gives a dataset. The file has a row for each
    sample: its number, and what predict() returned for it. All workers take part, and the rows are the same on any
    number of them. A command that was killed continues where it was when it is given again.

    \b
    Examples:
      quorate predict last validation -o predictions.jsonl
      quorate predict digits-0001 new.py:pictures -o out.parquet --workers 2
    """
    from quorate.api.evaluate import Asked, predict_run

    layer = overrides(settings, workers=workers, task=task)
    asked = Asked(runs, run, checkpoint, os.environ, layer, trust_job, _display(True, prints))
    done = predict_run(asked, data, output, averaged)
    fields = asdict(done) | {"file": str(done.file)}
    before = f" ({done.earlier:,} of them from before)" if done.earlier else ""
    print_answer(as_json, fields, f"{done.rows:,} rows{before} of {done.run} at step {done.step:,} are in {done.file}.")


def resize(
    run: Run,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="The new number of workers.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option("--servers", metavar="N", min=1, help="The new number of parameter servers.")
    ] = None,
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Change the number of workers or parameter servers of a running job.

    The change is made at a step boundary: no process restarts, and no step is lost. The result keeps its bits, except
    with strategy: ddp and asynchronous training. A server hands over its parameters before it leaves.

    \b
    Examples:
      quorate resize last --workers 4
      quorate resize digits-0001 --workers 1
      quorate resize last --servers 3
    """
    from quorate.api import control

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
        float, typer.Option(metavar="SECONDS", min=1, help="How long to wait for the checkpoint.")
    ] = 300.0,
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Make a running job save a checkpoint now.

    It is saved at the next step boundary, while training continues. The command ends when the checkpoint is complete on
    disk.

    \b
    Examples:
      quorate checkpoint last
      quorate checkpoint digits-0001 --timeout 600
    """
    from quorate.api import control

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
    now: Annotated[bool, typer.Option("--now", help="End it at once, without completing the step and saving.")] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long to wait for the job to end.")
    ] = 300.0,
    runs: Runs = RUNS,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Stop a running job cleanly: it completes its step and saves, as with Ctrl-C.

    The command returns when the job has ended. With --now nothing more is saved; existing checkpoints are kept. The
    exit code is 0 if the job has ended, 1 if it has not within the timeout, and 2 if it was not running.

    \b
    Examples:
      quorate stop last
      quorate stop digits-0001 --now
    """
    from quorate.api import control
    from quorate.api.result import open_run

    folder = control.stop(find_run(runs, run, address), now=now, patience=min(timeout, 30.0) if now else timeout)
    result = open_run(folder.path)
    saved = f"with its newest checkpoint at step {result.steps:,}" if result.steps else "before anything was saved"
    sentence = f"{result.run} is {result.status}, {saved}."
    if result.status == "complete":
        sentence = f"{result.run} was complete before it could be stopped, after {result.steps:,} steps."
    print_answer(as_json, {"run": result.run, "status": result.status, "steps": result.steps}, sentence)


def report(result: Any, as_json: bool) -> None:
    """Print the `Result` of a job, with what to do next if it did not complete, and end the command."""
    from quorate.api.recorded_run import remains_of
    from quorate.cli.errors import show_next
    from quorate.observe.screen import Screen, print_summary
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
