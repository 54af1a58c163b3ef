"""`quorate track`: send to trackers what they have missed of a run."""

import contextlib
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from quorate.cli.options import RUNS, Json, Run, Runs, TrustJob
from quorate.cli.output import print_document
from quorate.core.errors import RequestError
from quorate.storage.run_folder import RunFolder, refuse_untrusted, why_untrusted


def track(
    run: Run,
    mlflow: Annotated[
        str | None,
        typer.Option(metavar="URI", help="An MLflow server or database; true: mlflow.db in the folder of runs."),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard's event files in the run folder.")
    ] = False,
    wandb: Annotated[str | None, typer.Option(metavar="MODE", help="W&B: offline or online.")] = None,
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Send a point every N steps. By default as in the job.")
    ] = None,
    trust_job: TrustJob = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Send to MLflow, TensorBoard or W&B what they do not have yet of a run.

    Without options, the points go to the trackers in the job's key `track`, for example after a server was unreachable.
    With options, they go to the trackers given here, so that a run can be tracked afterwards. Nothing is sent twice.
    The exit code is 1 if something is still missing.

    \b
    Examples:
      quorate track last
      quorate track digits-0001 --mlflow http://127.0.0.1:5000
      quorate track last --mlflow true --tensorboard
    """
    from quorate.api.observers import refuse_missing_libraries
    from quorate.api.tracker import catch_up
    from quorate.spec.load import load_recorded
    from quorate.spec.override import Override

    folder = RunFolder(RunFolder.find(runs, run).path.absolute())
    if not trust_job:
        why = why_untrusted(runs, run, folder.path)
        refuse_untrusted(why, folder.path, "neither the trackers nor the task that its job names are used")
    asked = {"mlflow": True if mlflow == "true" else mlflow, "tensorboard": tensorboard or None, "wandb": wandb}
    given = {key: value for key, value in asked.items() if value is not None}
    how_often = {} if every is None else {"every": every}
    layer = [Override("track.every", every, "--every")] if every is not None else []
    if given:
        layer = [Override("track", {**given, **how_often}, "the command line")]
    spec = load_recorded(folder.job_file, {}, layer).spec
    if spec.track is None or not spec.track.has_trackers:
        raise RequestError(
            f"the job of run {folder.name} is not tracked: say where to track it, such as --mlflow true, "
            "--tensorboard or --wandb offline."
        )
    refuse_missing_libraries(spec.track)
    # The model is built by the task, and what it prints is no part of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        told = catch_up(folder, spec, spec.track)
    if as_json:
        sent = [asdict(each) | {"missing": each.missing or None} for each in told]
        print_document({"run": folder.name, "folder": str(folder.path), "trackers": sent})
    else:
        for each in told:
            points = f"{each.points:,} points were sent" if each.points else "nothing was missing"
            print(each.missing or f"{each.tracker} has all of {folder.name}, up to step {each.last_step}: {points}.")
    raise typer.Exit(1 if any(each.missing for each in told) else 0)
