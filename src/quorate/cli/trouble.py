"""How a verb that did not succeed ends: with an error for people, a document for programs, and an exit code."""

import json
import sys
import traceback
from typing import Any

import typer

from quorate.core.errors import QuorateError
from quorate.core.failure import JobFailed
from quorate.core.user_code import describe

STATUSES = {2: "refused", 130: "interrupted", 143: "terminated"}


def tell(error: QuorateError, as_json: bool) -> int:
    """Tell why nothing was started, or why a job ended; the exit code."""
    print(f"error: {error.message}", file=sys.stderr)
    if isinstance(error, JobFailed):
        failure = error.failure
        fields: dict[str, Any] = {"run": error.run, "error": failure.message, "failure": failure.to_dict()}
        return _end(failure.exit_code, fields, as_json)
    return _end(error.exit_code, {"error": error.message}, as_json)


def tell_usage(error: typer.TyperException, as_json: bool) -> int:
    """Tell a mistake on the command line itself, with the verb's usage; the exit code."""
    error.show()  # type: ignore[attr-defined]  # every error of the parser has it, but not by its public type
    return _end(error.exit_code, {"error": error.format_message()}, as_json)


def tell_bug(error: Exception, as_json: bool) -> int:
    """Tell an error that nobody foresaw, with its traceback, which is for us; the exit code."""
    traceback.print_exception(error)
    print("error: Quorate itself has failed, by the traceback above; please report it.", file=sys.stderr)
    return _end(1, {"error": describe(error)}, as_json)


def _end(code: int, fields: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"status": STATUSES.get(code, "failed"), "exit_code": code, **fields}))
    return code
