"""The `quorate` command with all its verbs; here are those before a first job, `init` and `doctor`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.chaos import chaos
from quorate.cli.checkpoints import app as checkpoints
from quorate.cli.clean import clean
from quorate.cli.data import app as data
from quorate.cli.history import diff, logs, report, runs, show, trace
from quorate.cli.jobs import checkpoint, evaluate, predict, resize, resume, stop, train
from quorate.cli.options import RUNS, Json, Runs, formerly, group_of_verbs, run_names
from quorate.cli.output import print_document
from quorate.cli.plan import find_lr, plan
from quorate.cli.top import top
from quorate.cli.tracking import app as models
from quorate.cli.tracking import track
from quorate.cli.tune import tune
from quorate.core.errors import RequestError
from quorate.storage.run_folder import RunFolder


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder to write to; it is created if it does not exist.")
    ] = Path(),
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the job. By default the name of the folder.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="List every key of a job, with its default.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Write a first job file and task, to change into your own.

    The job trains as it is, in seconds: job.yaml has the usual keys, task.py a model, data, a loss, an optimizer and
    metrics. With --full, job.yaml lists every key of a job. Existing files are not replaced without --force.

    \b
    Examples:
      quorate init
      quorate init circles
      quorate init circles --full
      quorate init circles --name first-try --force
    """
    from quorate.cli.scaffold import write_scaffold

    write_scaffold(folder, name, force, full, as_json)


def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Check the coordinator of this run only: a name, a unique prefix of it, a path, or last.",
            autocompletion=run_names,
        ),
    ] = None,
    runs: Runs = RUNS,
    engine: Annotated[
        str, typer.Option(metavar="ENGINE", help="local, or ray: check the nodes of a Ray cluster, too.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="The address of the cluster, as engine.address of a job.", show_default="auto"
        ),
    ] = None,
    storage: Annotated[str | None, typer.Option(metavar="FOLDER", help="A folder that all nodes should share.")] = None,
    as_json: Json = False,
) -> None:
    """Show what is installed, usable and reachable here.

    Each line is the result of one check, with what to do if it has found a problem. Without RUN, the coordinators of
    all running jobs in the folder of runs are checked. The exit code is 1 if there is a problem, otherwise 0.

    \b
    Examples:
      quorate doctor
      quorate doctor last
      quorate doctor --json
      quorate doctor --engine ray --address head:6379 --storage /mnt/shared
    """
    from quorate.doctor.checkup import checks_of, checks_of_engine, examine
    from quorate.doctor.report import exit_code, print_findings, to_document
    from quorate.observe.screen import Screen

    checks = checks_of(runs, os.environ, None if run is None else RunFolder.find(runs, run))
    found = examine([*checks, *checks_of_engine(engine, address, storage)])
    if as_json:
        findings = list(found)
        print_document(to_document(findings))
    else:
        findings = print_findings(found, Screen(sys.stdout))
    raise typer.Exit(exit_code(findings))


app = group_of_verbs("quorate", add_completion=True)
PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Start": (init, plan, find_lr, train, resume, tune),
    "Look": (runs, show, logs, report, top, diff, trace),
    "Control": (resize, checkpoint, stop),
    "Manage": (checkpoints, models, track, clean),
    "More": (evaluate, predict, data, chaos, doctor),
}
OLD_OUTPUTS = {"find-lr": "plot", "show": "plot", "trace": "chrome"}
for panel, verbs in PANELS.items():
    for verb in verbs:
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, rich_help_panel=panel)
        else:
            name = "eval" if verb is evaluate else verb.__name__.replace("_", "-")
            settings = formerly(OLD_OUTPUTS[name]) if name in OLD_OUTPUTS else None
            app.command(name, rich_help_panel=panel, context_settings=settings)(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        # Here, because reading the metadata takes longer than all the rest of a help text.
        from importlib.metadata import version

        typer.echo(f"quorate {version('quorate')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(  # noqa: ARG001 (its callback has acted on it)
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Distributed PyTorch training that keeps going, to the same bits on any number of workers.

    \b
    First steps:
      quorate init first && cd first
      quorate train job.yaml
      quorate show last
    """
    # Every verb works on paths that begin here, and each would fail at another of them, with other words.
    try:
        os.getcwd()  # noqa: PTH109 (the question is whether there is one)
    except OSError as error:
        raise RequestError(
            f"the folder in which this was typed can no longer be found ({error.strerror}): it was removed or moved. "
            "Change to one that is there, such as: cd ~"
        ) from None
