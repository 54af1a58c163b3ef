"""The file that a report is written to, if one is wanted."""

import json
from pathlib import Path
from typing import Any

from quorate.core.errors import OutputError, RequestError
from quorate.storage.atomic import write_atomically


def check_output(path: Path | None) -> None:
    """Refuse a file that could not be written, before minutes are spent on what would be lost."""
    if path is None:
        return
    if path.is_dir():
        raise RequestError(f"--output: {path} is a folder. Give the name of a file in it.")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--output: the folder {path.absolute().parent} does not exist. Make it first.")


def write_document(path: Path | None, document: dict[str, Any]) -> None:
    """Write a document, in the place of what is there."""
    if path is None:
        return
    try:
        write_atomically(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"--output: {path} could not be written: {error.strerror}.") from None
