"""What to type after `quorate init`."""

import shlex
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from quorate.cli.beginning import JOB_FILE, TASK_FILE, Beginning
from quorate.observe.screen import Screen


def commands_after(beginning: Beginning) -> list[str]:
    """The commands that train what was written."""
    enter = [] if beginning.folder == Path() else [f"cd {shlex.quote(str(beginning.folder))}"]
    return [*enter, f"quorate train {JOB_FILE}"]


def print_next_steps(beginning: Beginning, stream: TextIO, is_terminal: bool, width: int | None = None) -> None:
    """Say what was written, and what to do with it."""
    screen = Screen(stream, is_terminal, width)
    screen.print("Written:")
    for file in beginning.files:
        screen.print(Text(f"  {file}"), soft_wrap=True)
    screen.print("\nThey train as they are. Next:")
    for command in commands_after(beginning):
        # Never broken by us: it is copied in one piece.
        screen.print(Text(f"  {command}", "bold"), soft_wrap=True)
    screen.print(f"\nThen put your own model and data into {TASK_FILE}.")


def to_document(beginning: Beginning) -> dict[str, Any]:
    """What was written, as a JSON document."""
    return {
        "status": "complete",
        "name": beginning.name,
        "folder": str(beginning.folder.absolute()),
        "files": [str(file.absolute()) for file in beginning.files],
        "next": commands_after(beginning),
    }
