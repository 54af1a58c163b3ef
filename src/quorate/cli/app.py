"""The `quorate` command with all its verbs; here are those before a first job, `init` and `doctor`."""

import contextlib
import os
import re
import shlex
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
from quorate.cli.proof import certify, key, replay
from quorate.cli.top import top
from quorate.cli.tracking import app as models
from quorate.cli.tracking import track
from quorate.cli.tune import tune
from quorate.core.errors import JobFileError, RequestError
from quorate.storage.run_folder import RunFolder

SKELETON = Path(__file__).parent / "skeleton"
JOB_FILE, TASK_FILE = "job.yaml", "task.py"
_NAME_LINE = re.compile(r"^name: .*$", re.MULTILINE)
_NOT_SET = re.compile(r"^# [a-z_]+: .*\n", re.MULTILINE)
_SHORT_HEAD = "# Train: quorate train job.yaml. All keys, with their defaults: quorate init all --full\n"
_COMMENT_COLUMN = 35


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
    write_scaffold(folder, name, force, full, as_json)


def write_scaffold(folder: Path, name: str | None, force: bool, is_full: bool = False, as_json: bool = False) -> None:
    """Write the skeleton into a folder, all of it or nothing, and print what to do with it."""
    from quorate.storage.atomic import discard, write_atomically, write_new_file

    job_name = name_of(folder) if name is None else _checked(name)
    contents = {folder / file: text for file, text in skeleton(job_name, is_full).items()}
    _refuse_existing(folder, list(contents), force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            for file, text in contents.items():
                if force:
                    write_atomically(file, text)
                else:
                    # Made anew or not at all: a file that has appeared since we looked is not ours to replace.
                    write_new_file(file, [text.encode()])
                    undo.callback(discard, file)
            undo.pop_all()
    except OSError as error:
        place = "" if error.filename in (None, os.fspath(folder)) else f" ({error.filename})"
        raise RequestError(
            f"cannot write into {folder}: {error.strerror or error}{place}. Choose another folder."
        ) from error
    _print_written(folder, job_name, list(contents), as_json)


def skeleton(name: str, is_full: bool = False) -> dict[str, str]:
    """The content of each file, for a job of this name; `is_full` with the keys that are not set, as comments."""
    from quorate.spec.yaml_document import write_value

    contents = {file: (SKELETON / file).read_text() for file in (JOB_FILE, TASK_FILE)}
    line = f"{f'name: {write_value(name)}':<{_COMMENT_COLUMN}}# runs are {name}-0001, {name}-0002, …"
    contents[JOB_FILE] = _NAME_LINE.sub(lambda _: line, contents[JOB_FILE], count=1)
    if not is_full:
        keys = contents[JOB_FILE][contents[JOB_FILE].index("version:") :]
        contents[JOB_FILE] = _SHORT_HEAD + _NOT_SET.sub("", keys)
    return contents


def name_of(folder: Path) -> str:
    """A job's name after its folder: what a name cannot hold becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-")[:100] or "job"


def _checked(name: str) -> str:
    from quorate.spec.load import resolve_mapping

    try:
        resolve_mapping({"task": "task.py:Task", "batch_size": 8, "steps": 1, "name": name}, "--name", {}, [])
    except JobFileError as error:
        raise RequestError(f"--name: {error.problems[0].text.replace(' (--name)', '')}.") from None
    return name


def _refuse_existing(folder: Path, files: list[Path], force: bool) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise RequestError(f"{folder} already exists and is not a folder. Choose another folder.")
    there = [file for file in files if os.path.lexists(file)]
    if there and not force:
        names = " and ".join(map(str, there))
        raise RequestError(
            f"{names} {'is' if len(there) == 1 else 'are'} already there, and nothing was written. "
            "Choose another folder, or replace with --force."
        )
    for file in there:
        if file.is_dir() and not file.is_symlink():
            raise RequestError(f"{file} is a folder, which --force does not replace. Choose another folder.")


def _print_written(folder: Path, name: str, files: list[Path], as_json: bool) -> None:
    enter = [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]
    commands = [*enter, f"quorate train {JOB_FILE}"]
    if as_json:
        document = {
            "status": "complete",
            "name": name,
            "folder": str(folder.absolute()),
            "files": [str(file.absolute()) for file in files],
            "next": commands,
        }
        print_document(document)
        return
    from rich.text import Text

    from quorate.observe.screen import Screen

    screen = Screen(sys.stdout)
    screen.print("Written:")
    for file in files:
        screen.print(Text(f"  {file}"), soft_wrap=True)
    screen.print("\nThey train as they are. Next:")
    for command in commands:
        # Never broken by us: it is copied in one piece.
        screen.print(Text(f"  {command}", "bold"), soft_wrap=True)
    screen.print(f"\nThen put your own model and data into {TASK_FILE}.")


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
    "Look": (runs, show, logs, report, top, diff, replay, trace),
    "Control": (resize, checkpoint, stop),
    "Manage": (checkpoints, models, key, track, certify, clean),
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
