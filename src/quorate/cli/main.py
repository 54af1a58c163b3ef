"""The `quorate` command: it runs a verb, and tells mistakes and failures in a few lines, without a traceback of ours.

Everything else is imported inside, so that a Ctrl-C in the first moments ends as quietly as a later one.
"""

import signal
import sys
from typing import Any


class Stopped(BaseException):
    """Ctrl-C or SIGTERM came before there was a job to stop.

    Not KeyboardInterrupt: the parser of the command line would swallow that.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def run() -> None:
    """Run the command and exit with its code."""
    as_json = "--json" in sys.argv
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        code = _run_verb(as_json)
    except Stopped as stopped:
        code = _tell_stop(stopped.number, as_json)
    sys.exit(code)


def _stop(number: int, _: Any) -> None:
    raise Stopped(number)


def _run_verb(as_json: bool) -> int:
    import logging

    import typer

    from quorate.cli.app import app
    from quorate.cli.trouble import tell, tell_bug, tell_usage
    from quorate.core.errors import QuorateError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        code: int | None = app(standalone_mode=False)
    except QuorateError as error:
        return tell(error, as_json)
    except typer.TyperException as error:
        return tell_usage(error, as_json)
    except Exception as error:
        return tell_bug(error, as_json)
    return code or 0


def _tell_stop(number: int, as_json: bool) -> int:
    import json

    status = "terminated" if number == signal.SIGTERM else "interrupted"
    print(f"{status} before anything was started", file=sys.stderr)
    if as_json:
        print(json.dumps({"status": status, "exit_code": 128 + number}))
    return 128 + number
