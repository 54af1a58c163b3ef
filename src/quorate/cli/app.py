"""The verbs of the `quorate` command."""

from importlib.metadata import version

import typer

from quorate.cli.resume import resume
from quorate.cli.train import train

app = typer.Typer(
    name="quorate",
    help="Distributed PyTorch training that keeps going, to the same bits on any number of workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(resume)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quorate {version('quorate')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Distributed PyTorch training that keeps going, to the same bits on any number of workers."""
