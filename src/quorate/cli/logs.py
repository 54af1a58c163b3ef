"""The verb `quorate logs`: what the processes of a run have logged and printed."""

import json
import os
import re
import sys
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer

from quorate.cli.options import RUNS, Json, Run, Runs, choose
from quorate.core.masking import mask, mask_all
from quorate.history.logs import Filter, LogRecord, RunLogs
from quorate.storage.run_folder import RunFolder, finite

LONGEST = 10_000
"""Characters of a message that are shown; `--json` has all."""
PROCESS_WIDTH = 17
STYLES = {"warning": "33", "error": "31", "critical": "1;31", "debug": "2"}
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Severity(StrEnum):
    """From what level on."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def logs(
    run: Run,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written, until the job has ended.")
    ] = False,
    worker: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only of this worker.")] = None,
    level: Annotated[str, typer.Option(help="From this level on: debug, info, warning or error.")] = "",
    grep: Annotated[
        str, typer.Option(metavar="TEXT", help="Only with this text in them, in small letters or not.")
    ] = "",
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show what all processes of a run have logged and printed, in the order of time.

    What a task prints has the level info, and the name of its worker. Secrets are masked. With --json each record has
    all its fields: time, level, logger, process, pid, worker, generation and step.

    \b
    Examples:
      quorate logs last
      quorate logs last -f --worker 1
      quorate logs digits-0001 --level warning
      quorate logs last --grep "out of memory" --json
    """
    folder = RunFolder.find(runs, run)
    wanted = Filter(worker, choose(level, Severity, "--level") if level else "", grep)
    found = RunLogs(folder)
    records = found.follow(lambda: folder.holder() is not None) if follow else found.new()
    fitting = (record for record in records if wanted.takes(record))
    if as_json:
        _print_records(folder.name, fitting)
    else:
        _print_lines(fitting, at_once=follow)


def _print_lines(records: Iterable[LogRecord], *, at_once: bool) -> None:
    colour = os.environ.get("FORCE_COLOR", "") not in ("", "0") or (
        sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    for record in records:
        print(line_of(record, colour=colour), flush=at_once)


def line_of(record: LogRecord, *, colour: bool) -> str:
    """A record for people: a line, and below it the traceback, if it has one."""
    moment = datetime.fromtimestamp(record.time).strftime("%m-%d %H:%M:%S.%f")[:-3]
    source = record.fields.get("source")
    level = "" if source else record.level
    message = _plain(record.message.rstrip("\n")).replace("\n", "\n    ")
    head, style = f"{moment}  {record.process:<{PROCESS_WIDTH}} {level:<7}", STYLES.get(record.level, "")
    below = "".join(f"\n    {line}" for line in _plain(record.exception).splitlines())
    if not colour:
        return f"{head}  {message}{below}"
    text = f"\x1b[{style}m{message}\x1b[0m" if style else message
    return f"\x1b[2m{head}\x1b[0m  {text}{below}"


def _plain(text: str) -> str:
    """Masked once more, for logs that were written elsewhere; nothing in it moves the cursor or rings a bell."""
    cut = f"{text[:LONGEST]} … ({len(text):,} characters)" if len(text) > LONGEST else text
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), mask(cut))


def _print_records(run: str, records: Iterable[LogRecord]) -> None:
    """One document, written as it grows: there may be gigabytes of records."""
    sys.stdout.write(f'{{"run": {json.dumps(run)}, "records": [')
    between = ""
    try:
        for record in records:
            sys.stdout.write(f"{between}\n{json.dumps(finite(mask_all(dict(record.fields))))}")
            between = ","
            sys.stdout.flush()
    finally:
        # Also where Ctrl-C ends a command that follows.
        sys.stdout.write("]}\n")
