"""`quorate track` and `quorate models`: what trackers have of a run, and MLflow's registry of models."""

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quorate.cli.options import RUNS, Json, Run, Runs, Task, TrustJob, Which, group_of_verbs
from quorate.cli.output import NONE, print_answer, print_document
from quorate.core.errors import RequestError
from quorate.storage.run_folder import RunFolder, refuse_untrusted, why_untrusted

if TYPE_CHECKING:  # torch, which a help text does without
    from quorate.api.models import ModelVersion

DIGEST_SHOWN = 8
HEADINGS = ("model", "aliases", "run", "step", "weights", "job", "data", "code", "commit")

Mlflow = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URI",
        envvar="MLFLOW_TRACKING_URI",
        help="An MLflow server or database; by default mlflow.db in the folder of runs.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A model's name in the registry.")]

app = group_of_verbs("models")


@app.callback()
def models() -> None:
    """List, register, promote and pull models, in MLflow's registry.

    \b
    Examples:
      quorate models register last --name digits
      quorate models promote digits 1 champion
      quorate models pull digits@champion
    """


@app.command("ls")
def list_all(mlflow: Mlflow = None, runs: Runs = RUNS, as_json: Json = False) -> None:
    """List all versions of all models, and where each comes from.

    The list shows the run and step of each version, and the digests of its job (of the keys that affect results), its
    data and its code. Digests are shortened; --json prints them in full, with seed, steps, commit and the digests of
    files.

    \b
    Examples:
      quorate models ls
      quorate models ls --mlflow http://127.0.0.1:5000 --json
    """
    from quorate.api.models import ModelRegistry, registry_uri
    from quorate.cli.layout import Page, headed_table
    from quorate.storage.run_notes import place

    registry = ModelRegistry(registry_uri(runs, mlflow))
    versions = registry.versions()
    if as_json:
        print_document({"registry": place(registry.uri), "models": [each.document() for each in versions]})
    elif versions:
        Page().table(headed_table(HEADINGS, rows=[_row(each) for each in versions]))
    else:
        Page().line(f"No model is registered at {place(registry.uri)}. Register one: quorate models register RUN")


@app.command()
def register(
    run: Run,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name to register under. By default the name of the job.")
    ] = None,
    checkpoint: Which = "last",
    task: Task = None,
    trust_job: TrustJob = False,
    mlflow: Mlflow = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Register the model of a complete run as the next version of a name.

    The weights, the job and, if torch.export supports the model, a graph that PyTorch loads without the task are stored
    in MLflow: where the job is tracked, or else in mlflow.db in the folder of runs. The same checkpoint is registered
    only once.

    \b
    Examples:
      quorate models register last
      quorate models register digits-0001 --name digits --checkpoint best
    """
    from quorate.api.models import register_model, registry_uri

    folder = RunFolder.find(runs, run)
    if not trust_job and (task is None or mlflow is None):
        refuse_untrusted(
            why_untrusted(runs, run, folder.path),
            folder.path,
            "neither the task nor the registry that its job names is used. Give --task FILE:Class and --mlflow URI",
        )
    # What the task prints while it builds the model is no part of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        version, is_new = register_model(folder, registry_uri(runs, mlflow, folder), name, checkpoint, task)
    lineage = version.lineage
    step = f" of step {lineage.step:,}" if lineage is not None else ""
    done = "registered as" if is_new else "is registered already as"
    sentence = f"{folder.name}: the model{step} {done} {version}."
    print_answer(as_json, {**version.document(), "new": is_new}, sentence)


@app.command()
def promote(
    name: Name,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="A version of the model.", min=1)],
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="An alias, such as champion or staging.")],
    mlflow: Mlflow = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Set an alias to a version: from then on NAME@ALIAS is that version.

    \b
    Examples:
      quorate models promote digits 2 champion
    """
    from quorate.api.models import ModelRegistry, registry_uri

    before = ModelRegistry(registry_uri(runs, mlflow)).promote(name, version, alias)
    told = "" if before in (None, version) else f"; before it was version {before}"
    fields = {"name": name, "alias": alias, "version": version, "before": before}
    print_answer(as_json, fields, f"{name}@{alias} is version {version}{told}.")


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="NAME@ALIAS or NAME/VERSION.")],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Where to write the files. By default NAME-VERSION in this folder."),
    ] = None,
    mlflow: Mlflow = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Download the weights (safetensors) and the job of a version.

    Both files are compared with their registered digests. If one has changed, it is named and nothing is written. An
    existing file with other content is not replaced.

    \b
    Examples:
      quorate models pull digits@champion
      quorate models pull digits/2 models/digits
    """
    from quorate.api.models import ModelRegistry, registry_uri

    version, into = ModelRegistry(registry_uri(runs, mlflow)).pull(model, folder)
    files = sorted(() if version.lineage is None else version.lineage.digests)
    fields = {**version.document(), "folder": str(into.absolute()), "files": files}
    print_answer(as_json, fields, f"{version}: {' and '.join(files)} in {into}, as they were registered.")


def _row(version: "ModelVersion") -> list[str]:
    aliases, lineage = ", ".join(version.aliases) or NONE, version.lineage
    if lineage is None:
        return [str(version), aliases, *[NONE] * (len(HEADINGS) - 2)]
    digests = (lineage.weights_digest, lineage.job_digest, lineage.data, lineage.code, lineage.git_commit)
    # What stands before a colon says how the digest was made.
    short = [NONE if digest is None else digest.rpartition(":")[2][:DIGEST_SHOWN] for digest in digests]
    return [str(version), aliases, lineage.run, f"{lineage.step:,}", *short]


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
    from quorate.api.run_part import refuse_missing_libraries
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
