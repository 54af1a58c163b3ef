"""The `quorate` command."""

import json
import logging
import sys
from importlib.metadata import version

import typer

from quorate.cli.resume import resume
from quorate.cli.train import train
from quorate.core.errors import QuorateError

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


def run() -> None:
    """Run the command; a mistake or a failure is told in a few lines, without a traceback of ours."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except QuorateError as error:
        sys.exit(tell(error, as_json="--json" in sys.argv))


def tell(error: QuorateError, as_json: bool) -> int:
    """Tell an error to a person, or to a program; the exit code."""
    from quorate.api.session import exit_code_of

    code = exit_code_of(error)
    print(f"error: {error.message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"status": "refused" if code == 2 else "failed", "error": error.message, "exit_code": code}))
    return code
