"""How a verb that trains ends: with a summary for people or a document for programs, and an exit code."""

import json
import sys

import typer

from quorate.api.result import Result
from quorate.observe.summary import print_summary


def report(result: Result, as_json: bool) -> None:
    """Print the result and end the command."""
    if as_json:
        print(json.dumps(result.fields))
    else:
        print_summary(result.fields, sys.stdout, is_terminal=sys.stdout.isatty())
    raise typer.Exit(result.exit_code)
