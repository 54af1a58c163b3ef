"""Arguments and options that several verbs share.

Nothing of the job file is imported here: `--help` and the shell's completion answer without it.
"""

from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.completion import job_files, run_names
from quorate.storage.run_search import USUAL, VARIABLE

RUNS = USUAL

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.", autocompletion=job_files)]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name, a unique prefix of it, a path, or last.", autocompletion=run_names
    ),
]
Runs = Annotated[Path, typer.Option("--runs", metavar="FOLDER", envvar=VARIABLE, help="The folder of run folders.")]
"""Give it the default `RUNS`."""
Workers = Annotated[
    str | None,
    typer.Option(metavar="N", help="Processes to run on: a number, or auto. Never changes the result."),
]
Lanes = Annotated[int | None, typer.Option(metavar="N", help="Slices of every batch: part of what the job means.")]
Steps = Annotated[int | None, typer.Option(metavar="N", help="Train this many steps.")]
Epochs = Annotated[int | None, typer.Option(metavar="N", help="Train this many epochs.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Where every random stream begins.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key, such as checkpoint.every=50. Repeatable."),
]
Task = Annotated[
    str | None,
    typer.Option("--task", metavar="FILE:Class", help="Where the task is now, if it was moved.", show_default=False),
]
Averaged = Annotated[
    bool | None,
    typer.Option(
        "--averaged/--trained",
        help="The averages of the parameters, or the parameters; by default as the job evaluates.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on standard output.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress: only warnings, errors and how the job ended.")
]
