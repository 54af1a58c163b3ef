"""What `quorate logs` shows: lines for people, or records."""

import os
import sys
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum

from quorate.cli.output import print_growing_document
from quorate.core.errors import RunError
from quorate.core.generation import names_of
from quorate.core.masking import mask, mask_all
from quorate.history.logs import Filter, LogRecord, RunLogs
from quorate.observe.quantities import visible
from quorate.storage.run_folder import RunFolder

LONGEST = 10_000
"""Characters of a message that are shown; `--json` has all."""
PROCESS_WIDTH = 17
STYLES = {"warning": "33", "error": "31", "critical": "1;31", "debug": "2"}


class Severity(StrEnum):
    """From what level on."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def show_logs(folder: RunFolder, wanted: Filter, follow: bool, as_json: bool) -> None:
    """Show the lines that are wanted: those that are there, or also those that follow."""
    logged = sorted({int(path.name.split(".")[0].partition("-")[2]) for path in folder.logs.glob("worker-*.*")})
    if not follow and logged and wanted.worker not in (None, *logged):
        raise RunError(f"run {folder.name} has no worker {wanted.worker}: it has logs of {names_of(logged, ' and ')}")
    found = RunLogs(folder)
    records = found.follow(lambda: folder.holder() is not None) if follow else found.new()
    fitting = (record for record in records if wanted.takes(record))
    if as_json:
        print_growing_document({"run": folder.name}, "records", (mask_all(dict(each.fields)) for each in fitting))
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
    try:
        moment = datetime.fromtimestamp(record.time).strftime("%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):  # no time that there could be: somebody has edited the log
        moment = "?" * 18
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
    masked = mask(text)
    cut = f"{masked[:LONGEST]} … ({len(masked):,} characters)" if len(masked) > LONGEST else masked
    return visible(cut)
