"""What the tagged version has written, and what it has answered about it: `scripts/make_fixtures.py` makes them, and
`history/test_written_before.py` asks the present version the same."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"
WRITTEN = FIXTURES / "written_before"
ANSWERS, SURFACE = FIXTURES / "answers.json", FIXTURES / "surface.json"
KEY = {"FIXTURE_KEY": bytes(range(32)).hex()}  # of encrypted checkpoints
HERE = "<here>"
RUNS = ("ring-0001", "servers-0001", "fsdp-0001", "encrypted-0001", "killed-0001")
SEARCH = "search-0001"
STORED = "stored/copied-0001"
"""A run of which only the copy of its checkpoints is left."""
QUESTIONS: dict[str, Sequence[str]] = {
    "runs": ("runs",),
    **{f"show {run}": ("show", run) for run in (*RUNS, SEARCH)},
    **{f"verify {run}": ("checkpoints", "verify", run) for run in RUNS},
    "list": ("checkpoints", "ls", RUNS[0]),
    "ledger": ("show", RUNS[0], "--ledger"),
    "logs": ("logs", RUNS[1]),
    **{f"diff {run}": ("diff", RUNS[0], run) for run in RUNS[2:4]},
}
"""Each is asked with --json."""
NOT_COMPARED = ("key", "origin", "mark")
"""What a key is called, which its path says already, where it comes from and what it affects: hundreds of lines."""
LABELS = ("key", "name", "run", "trial")


def lay_out(folder: Path) -> None:
    """Copy what was written into a folder, where its names are the usual ones."""
    shutil.copytree(WRITTEN, folder, dirs_exist_ok=True)
    (folder / "written").rename(folder / "runs")


def export_of(run: str) -> tuple[str, ...]:
    """The command that writes the weights of a run into `weights.safetensors`."""
    return ("checkpoints", "export", run, "-o", "weights.safetensors", "--force")


def leaves(document: Any, folder: Path, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values of an answer, by their paths in it: what is in a list by its key or name where it has one."""
    if isinstance(document, dict) and document:
        for name, each in document.items():
            yield from () if name in NOT_COMPARED else leaves(each, folder, f"{path}/{name}")
    elif isinstance(document, list) and document:
        for place, each in enumerate(document):
            label = next((str(each[word]) for word in LABELS if word in each), None) if isinstance(each, dict) else None
            yield from leaves(each, folder, f"{path}/{place if label is None else label}")
    else:
        yield path, document.replace(str(folder), HERE) if isinstance(document, str) else document


def surface() -> dict[str, Any]:
    """What users of the package can name: in Python, in the shell, in job files and in event logs."""
    import typer

    import quorate
    from quorate.cli.app import app
    from quorate.observe.event import KINDS
    from quorate.spec.job import JobSpec
    from quorate.spec.keys import keys_of

    verbs = dict(_verbs(typer.main.get_command(app)))
    codes = {name: getattr(getattr(quorate, name), "exit_code", None) for name in quorate.__all__}
    ends = ("complete", "failed", "lost", "interrupted", "terminated")
    codes |= {end: quorate.Result("", Path(), end, 0, {}, "", 0.0, 0.0).exit_code for end in ends}
    return {
        "names": sorted(quorate.__all__),
        "verbs": sorted(verbs),
        "options": sorted(f"{verb} {option}" for verb, options in verbs.items() for option in options),
        "keys": sorted(keys_of(JobSpec)),
        "events": sorted(KINDS),
        "exit codes": sorted(f"{name} {code}" for name, code in codes.items() if isinstance(code, int)),
    }


def _verbs(command: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    for name, each in command.commands.items():
        if hasattr(each, "commands"):
            yield from _verbs(each, f"{path}{name} ")
        else:
            yield f"{path}{name}", [word for option in each.params for word in option.opts if word.startswith("--")]


if __name__ == "__main__":  # with whichever version is imported
    print(json.dumps(surface(), indent=1))
