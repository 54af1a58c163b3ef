"""What several verbs share of their command lines: how they are listed, arguments, options, and what Tab offers.

Nothing of the job file is imported at the top: `--help` and the shell's completion answer without it.
"""

import contextlib
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from quorate.core.errors import RequestError, RunError
from quorate.core.runs_folder import RUNS_ENV, USUAL_RUNS, runs_folder
from quorate.storage.run_folder import LAST, RunFolder

LONGEST_HELP = 1000
MEANT = {"fit": "train", "run": "train", "start": "train", "launch": "train"}
"""How others call a verb; to `run`, `runs` would be nearer."""
GONE = {
    "checkpoints copy": "a job copies its checkpoints to the places in checkpoint.to, also from a resume on (quorate "
    "resume RUN --set 'checkpoint.to=[checkpoints, /mnt/backup]'). Of a run that is complete, copy the folder with any "
    "tool, and read the copy through: quorate checkpoints verify /mnt/backup/RUN",
    "data preview": "quorate data verify says what cannot be read, and Python shows a record: "
    "python -c 'import quorate; print(quorate.Shards(\"PATH\")[0])'",
}
"""What is used instead of a verb that was removed."""
Choice = TypeVar("Choice", bound=StrEnum)


class Verbs(TyperGroup):
    """The group of verbs. Its flags are false where they are not given.

    Typer leaves `--help` and the flags of the shell's completion without a value, and imports pydantic to learn that
    nothing is no boolean: that would be half the time that `quorate VERB --help` takes.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        return parameters

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The verbs by panel, each with its first sentence, which is broken where the line ends and never cut."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            verb = self.commands[name]
            panel = getattr(verb, "rich_help_panel", None)
            panels.setdefault(panel if isinstance(panel, str) else "Verbs", []).append(
                (name, verb.get_short_help_str(LONGEST_HELP))
            )
        column = max(map(len, self.commands))
        for panel, verbs in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(f"{name:<{column}}", text) for name, text in verbs])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and (meant := MEANT.get(args[0])) in self.commands:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{meant}'?")
        if (instead := GONE.get(f"{self.name} {args[0]}")) is not None:
            raise RequestError(f"quorate {self.name} {args[0]} is gone: {instead}")
        return super().resolve_command(ctx, args)


def group_of_verbs(name: str, metavar: str = "VERB ...", add_completion: bool = False) -> typer.Typer:
    """The command itself, or a verb that has verbs of its own."""
    return typer.Typer(
        name=name,
        cls=Verbs,
        subcommand_metavar=metavar,
        context_settings={"help_option_names": ["-h", "--help"]},
        # Plain text: there in half the time of rich's boxes, and examples stay as written.
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
    )


_TAKE_SEARCHES = ("show", "report", "tune")


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the runs in the folder of `--runs`, and `last`, that begin like this; of searches where the verb takes
    them, and of nothing else for `tune --resume`.

    A completion is silent: where nothing can be offered, for whatever reason, the shell goes on to offer files.
    """
    from quorate.core.runs_folder import is_run, is_search
    from quorate.storage.run_folder import LAST

    verb = context.info_name
    try:
        folders = list(runs_folder(context.params.get("runs")).iterdir())
        names = sorted(
            folder.name
            for folder in folders
            if (verb != "tune" and is_run(folder)) or (verb in _TAKE_SEARCHES and is_search(folder))
        )
    except OSError:
        return []
    return [name for name in (*names, LAST) if names and name.startswith(incomplete)]


RUNS = USUAL_RUNS


def _project_runs(context: typer.Context, parameter: typer.CallbackParam, value: Path) -> Path:
    """The folder that was named; otherwise that of the working folder, or of the nearest one above it."""
    source = context.get_parameter_source(str(parameter.name))
    return value if source is not None and source.name != "DEFAULT" else runs_folder()


JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name, a unique prefix of it, a path, or last.", autocompletion=run_names
    ),
]
Runs = Annotated[
    Path,
    typer.Option(
        "--runs",
        metavar="FOLDER",
        envvar=RUNS_ENV,
        help="The folder of run folders. By default runs, in this folder, in one above it, or in the only one below.",
        show_default=False,
        callback=_project_runs,
    ),
]
"""Give it the default `RUNS`."""
NewRuns = Annotated[
    str | None,
    typer.Option(
        "--runs",
        metavar="FOLDER",
        help="The folder in which the run folder is created. By default where the job has runs.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="A Ray cluster whose detached runs are searched, too; written as engine.address of a job.",
        show_default="RAY_ADDRESS",
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Processes to run on: a number, or auto. Never changes the result of ring or synchronous servers.",
    ),
]
Lanes = Annotated[int | None, typer.Option(metavar="N", help="Slices of every batch. Affects the result.")]
Steps = Annotated[int | None, typer.Option(metavar="N", help="Train this many steps.")]
Epochs = Annotated[int | None, typer.Option(metavar="N", help="Train this many epochs.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The seed of all random streams.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key, such as checkpoint.every=50. Repeatable."),
]
Task = Annotated[
    str | None, typer.Option("--task", metavar="FILE:Class", help="Where the task is now, if it has moved.")
]
TrustJob = Annotated[
    bool,
    typer.Option(
        "--trust-job", help="Use what the job of a run names that is given by its path, also if others can write there."
    ),
]
Which = Annotated[str, typer.Option("--checkpoint", metavar="WHICH", help="last, best, or a step.")]
Averaged = Annotated[
    bool | None,
    typer.Option(
        "--averaged/--trained", help="Use the averaged or the trained weights. By default those that the job evaluates."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on standard output.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress: only warnings, errors and how the job ended.")
]


def to_file(help: str) -> Any:
    """The option of a verb that writes a file."""
    return typer.Option("--output", "-o", metavar="FILE", help=help)


def formerly(old: str) -> dict[str, Any]:
    """Settings of a verb whose `--output` had another name, which goes on to be understood."""
    return {"token_normalize_func": lambda name: "output" if name == old else name}


def choose(given: str, choices: type[Choice], option: str) -> Choice:
    """The choice that was given; a mistake is answered with all that are allowed and the nearest."""
    if given in list(choices):
        return choices(given)
    from quorate.spec.keys import nearest, one_of

    allowed = [choice.value for choice in choices]
    meant = nearest(given.lower(), allowed)
    hint = f" Did you mean {meant[0]}?" if meant else ""
    raise RequestError(f"{option}: {given!r} is not one of {one_of(allowed)}.{hint}")


def job_of(job_file: Path, settings: list[str] | None, **flags: str | int | None) -> Any:
    """The job of a file as a `ResolvedJob`, under the environment and what the command line puts over it."""
    from quorate.spec.load import load_job

    return load_job(job_file, os.environ, overrides(settings, **flags))


def overrides(settings: list[str] | None, **flags: str | int | None) -> list[Any]:
    """The `Override`s that the command line puts over the job file; flags go over `--set`."""
    from quorate.spec.override import Override, parse_sets

    layer = parse_sets(settings or ())
    for key, value in flags.items():
        if value is not None:
            if key != "runs":  # a folder may be called by a number
                with contextlib.suppress(ValueError):  # text, such as auto
                    value = int(value)
            layer.append(Override(key, value, f"--{key}"))
    return layer


def find_run(runs: Path, reference: str, address: str | None = None) -> RunFolder:
    """The run that a person means: in the folder of runs; or else, where a cluster is named by `address` or by
    RAY_ADDRESS, a detached one by that cluster's list of jobs."""
    try:
        return RunFolder.find(runs, reference)
    except RunError as error:
        variables = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
        is_named = address is not None or any(os.environ.get(name) for name in variables)
        if not is_named or reference == LAST or os.sep in reference:
            raise
        from quorate.engines.ray.jobs import find_detached

        return find_detached(reference, address, error)
