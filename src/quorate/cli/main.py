"""The `quorate` command: it runs a verb, and reports mistakes and failures in a few lines, without a traceback of ours.

Everything else is imported inside, so that a Ctrl-C in the first moments ends as quietly as a later one.
"""

import signal
import sys
from collections.abc import Callable
from typing import Any


class Stopped(BaseException):
    """Ctrl-C, SIGTERM or the end of the terminal came while there was no job to stop: before one, or after it.

    Not KeyboardInterrupt: the parser of the command line would swallow that.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def run(load: Callable[[], Any] | None = None) -> None:
    """Run the command and exit with its code: `quorate`, or what `load` imports."""
    as_json = "--json" in sys.argv
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup asks for the end of the terminal to be ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _Stop())
        code = _run_verb(load, as_json)
    except Stopped as stopped:
        code = _report_stop(stopped.number, as_json)
    sys.exit(code)


class _Stop:
    """Handles a signal by leaving the command, and gives way to a job, which handles it better."""

    gives_way_to_jobs = True

    def __call__(self, number: int, _: Any) -> None:
        raise Stopped(number)


def _run_verb(load: Callable[[], Any] | None, as_json: bool) -> int:
    import logging

    from quorate.cli.output import guard_output
    from quorate.core.errors import OutputError

    guard_output()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger().handlers[0].setFormatter(_formatter())
    try:
        if load is None:
            from quorate.cli.app import app
        else:
            app = load()
        answer = app(standalone_mode=False)
        code = answer if isinstance(answer, int) else 0
    except Exception as error:
        # Only now: what shows an error well takes its time to be imported, and most commands need none of it.
        from quorate.cli.errors import show_error

        code = show_error(error, as_json)
    try:
        sys.stdout.flush()
    except OutputError as error:
        from quorate.cli.errors import show_error

        code = max(code, show_error(error, as_json))
    return code


def _formatter() -> Any:
    import logging

    class Masked(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            # Only now: most commands have nothing to warn of.
            from quorate.core.masking import mask

            return mask(super().format(record))

    return Masked("%(levelname)s: %(message)s")


def _report_stop(number: int, as_json: bool) -> int:
    from quorate.cli.output import print_document

    is_interrupt = number == signal.SIGINT
    status, code = ("interrupted", 130) if is_interrupt else ("terminated", 143)
    print(status, file=sys.stderr)
    if as_json:
        print_document({"status": status, "exit_code": code, "error": status})
    return code
