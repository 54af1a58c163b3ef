"""How a verb that trains ends: with a summary for people or a document for programs, and an exit code."""

import sys

import typer

from quorate.api.remains import remains_of
from quorate.api.result import Result
from quorate.cli.document import print_document
from quorate.cli.trouble import tell_next
from quorate.core.errors import OutputError
from quorate.observe.summary import print_summary
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder


def report(result: Result, as_json: bool) -> None:
    """Print the result and end the command."""
    run = RunFolder(result.folder)
    try:
        if as_json:
            print_document(result.fields)
        else:
            print_summary(result.fields, sys.stdout, is_terminal=sys.stdout.isatty())
        sys.stdout.flush()
    except OutputError as error:
        # A job that was stopped because its terminal is gone has nobody to tell, and its exit code says more.
        if not result.exit_code:
            raise OutputError(f"{error.message} The result is in {run.result_file}.") from None
    if result.exit_code:
        tell_next(remains_of(run, load_recorded(run.job_file, {}, []).spec))
    raise typer.Exit(result.exit_code)
