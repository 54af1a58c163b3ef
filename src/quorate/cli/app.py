"""The verbs of the `quorate` command."""

import os

import typer

from quorate.cli.chaos import chaos
from quorate.cli.checkpoints import app as checkpoints
from quorate.cli.data import app as data
from quorate.cli.history import diff, runs, show
from quorate.cli.jobs import checkpoint, evaluate, resize, resume, train
from quorate.cli.options import group_of_verbs
from quorate.cli.setup import doctor, init
from quorate.core.errors import RequestError

app = group_of_verbs("quorate", add_completion=True)
app.command()(init)
app.command()(train)
app.command()(resume)
app.command("eval")(evaluate)
app.command()(runs)
app.command()(show)
app.command()(diff)
app.command()(resize)
app.command()(checkpoint)
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(data, name="data")
app.command()(chaos)
app.command()(doctor)


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
            f"the folder in which this was typed cannot be found any more ({error.strerror}): it was removed or moved. "
            "Change to one that is there, such as: cd ~"
        ) from None
