"""A first job file and task, written into a folder of the user's, and what to type next."""

import contextlib
import os
import re
import shlex
import sys
from pathlib import Path

from rich.text import Text

from quorate.cli.output import print_document
from quorate.core.errors import JobFileError, RequestError
from quorate.observe.screen import Screen
from quorate.spec.load import resolve_mapping
from quorate.spec.yaml_document import write_value
from quorate.storage.atomic import discard, write_atomically, write_new_file

SKELETON = Path(__file__).parent / "skeleton"
JOB_FILE, TASK_FILE = "job.yaml", "task.py"
_NAME_LINE = re.compile(r"^name: .*$", re.MULTILINE)
_NOT_SET = re.compile(r"^# [a-z_]+: .*\n", re.MULTILINE)
_SHORT_HEAD = "# Train: quorate train job.yaml. All keys, with their defaults: quorate init all --full\n"
_COMMENT_COLUMN = 35


def write_scaffold(folder: Path, name: str | None, force: bool, is_full: bool = False, as_json: bool = False) -> None:
    """Write the skeleton into a folder, all of it or nothing, and print what to do with it."""
    job_name = name_of(folder) if name is None else _checked(name)
    contents = {folder / file: text for file, text in skeleton(job_name, is_full).items()}
    _refuse_existing(folder, list(contents), force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            for file, text in contents.items():
                if force:
                    write_atomically(file, text)
                else:
                    # Made anew or not at all: a file that has appeared since we looked is not ours to replace.
                    write_new_file(file, [text.encode()])
                    undo.callback(discard, file)
            undo.pop_all()
    except OSError as error:
        place = "" if error.filename in (None, os.fspath(folder)) else f" ({error.filename})"
        raise RequestError(
            f"cannot write into {folder}: {error.strerror or error}{place}. Choose another folder."
        ) from error
    _show(folder, job_name, list(contents), as_json)


def skeleton(name: str, is_full: bool = False) -> dict[str, str]:
    """The content of each file, for a job of this name; `is_full` with the keys that are not set, as comments."""
    contents = {file: (SKELETON / file).read_text() for file in (JOB_FILE, TASK_FILE)}
    line = f"{f'name: {write_value(name)}':<{_COMMENT_COLUMN}}# runs are {name}-0001, {name}-0002, …"
    contents[JOB_FILE] = _NAME_LINE.sub(lambda _: line, contents[JOB_FILE], count=1)
    if not is_full:
        keys = contents[JOB_FILE][contents[JOB_FILE].index("version:") :]
        contents[JOB_FILE] = _SHORT_HEAD + _NOT_SET.sub("", keys)
    return contents


def name_of(folder: Path) -> str:
    """A job's name after its folder: what a name cannot hold becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-")[:100] or "job"


def _checked(name: str) -> str:
    try:
        resolve_mapping({"task": "task.py:Task", "batch_size": 8, "steps": 1, "name": name}, "--name", {}, [])
    except JobFileError as error:
        raise RequestError(f"--name: {error.problems[0].text.replace(' (--name)', '')}.") from None
    return name


def _refuse_existing(folder: Path, files: list[Path], force: bool) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise RequestError(f"{folder} already exists and is not a folder. Choose another folder.")
    there = [file for file in files if os.path.lexists(file)]
    if there and not force:
        names = " and ".join(map(str, there))
        raise RequestError(
            f"{names} {'is' if len(there) == 1 else 'are'} already there, and nothing was written. "
            "Choose another folder, or replace with --force."
        )
    for file in there:
        if file.is_dir() and not file.is_symlink():
            raise RequestError(f"{file} is a folder, which --force does not replace. Choose another folder.")


def _show(folder: Path, name: str, files: list[Path], as_json: bool) -> None:
    enter = [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]
    commands = [*enter, f"quorate train {JOB_FILE}"]
    if as_json:
        document = {
            "status": "complete",
            "name": name,
            "folder": str(folder.absolute()),
            "files": [str(file.absolute()) for file in files],
            "next": commands,
        }
        print_document(document)
        return
    screen = Screen(sys.stdout)
    screen.print("Written:")
    for file in files:
        screen.print(Text(f"  {file}"), soft_wrap=True)
    screen.print("\nThey train as they are. Next:")
    for command in commands:
        # Never broken by us: it is copied in one piece.
        screen.print(Text(f"  {command}", "bold"), soft_wrap=True)
    screen.print(f"\nThen put your own model and data into {TASK_FILE}.")
