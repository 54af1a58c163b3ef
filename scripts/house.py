"""How large the house is: lines and files of each room, what a worker imports, keys, verbs, events and protocols.

::

    python scripts/house.py            # show the figures
    python scripts/house.py --check    # fail where one is above house.toml
    python scripts/house.py --write    # lower house.toml to what is so now

A landing may lower the figures. One that has to raise them says so by changing house.toml itself.
"""

import argparse
import ast
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import typer

import quorate
from quorate.cli.app import app
from quorate.observe.event import KINDS
from quorate.spec.job import JobSpec
from quorate.spec.keys import keys_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS, LIMITS = ROOT / "src/quorate", ROOT / "tests", ROOT / "house.toml"
GENERATED = "_pb2"
LARGEST = 6
"""Members of a protocol above which it counts as large."""

# A ring job on local CPU processes, whose worker writes down which modules of ours it has.
TASK = """
import json, sys
from pathlib import Path
import torch, quorate

class Seen(quorate.Task):
    def model(self):
        return torch.nn.Linear(2, 1)
    def datasets(self):
        return [torch.ones(2)] * 8
    def loss(self, model, batch):
        ours = [each for name, each in list(sys.modules.items()) if name.startswith("quorate.")]
        files = [getattr(each, "__file__", None) for each in ours]
        Path(__file__).with_name("seen.json").write_text(json.dumps([file for file in files if file]))
        return model(batch).square().mean()
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def main() -> int:
    """Show the figures, or compare them with what is allowed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where a figure is above house.toml")
    parser.add_argument("--write", action="store_true", help="lower house.toml to these figures")
    options = parser.parse_args()
    figures = measured()
    if not LIMITS.exists() or not (options.check or options.write):
        print("\n".join(_lines(figures)))
    allowed = tomllib.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    risen = [
        f"{section}.{name}: {value:,}, and house.toml allows {allowed.get(section, {}).get(name, 0):,}"
        for section, some in figures.items()
        for name, value in some.items()
        if allowed and value > allowed.get(section, {}).get(name, 0)
    ]
    if options.write and not (allowed and risen):
        LIMITS.write_text(
            "# The figures of scripts/house.py, none of which may rise.\n" + "\n".join(_lines(figures)) + "\n"
        )
    if risen and (options.check or options.write):
        print("The house has grown:", *risen, sep="\n  ", file=sys.stderr)
        return 1
    return 0


def measured() -> dict[str, dict[str, int]]:
    """All figures, by section and name."""
    rooms: dict[str, list[Path]] = {}
    for file in _files(PACKAGE):
        rooms.setdefault(file.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(file)
    whole = [file for files in rooms.values() for file in files]
    imported = [file for file in ring_worker() if _counts(file)]
    return {
        "package": {"lines": _count(whole), "files": len(whole), "largest_file": max(map(_length, whole))},
        "room_lines": {name: _count(files) for name, files in sorted(rooms.items())},
        "room_files": {name: len(files) for name, files in sorted(rooms.items())},
        "tests": {"lines": _count(_files(TESTS)), "files": len(list(_files(TESTS)))},
        "ring_worker": {"modules": len(imported), "lines": _count(imported)},
        "surface": {
            "keys": len(keys_of(JobSpec)),
            "verbs": sum(1 for _ in _verbs(typer.main.get_command(app))),
            "events": len(KINDS),
        },
        "protocols": _protocols(whole),
    }


def ring_worker() -> list[Path]:
    """The files of ours that a worker of a plain ring job has imported in a step."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "seen.py"
        task.write_text(TASK)
        job = quorate.Job(task=f"{task}:Seen", batch_size=8, lanes=2, workers=1, steps=2, runs=f"{folder}/runs")
        quorate.train(job, progress=False)
        return [Path(each) for each in json.loads(task.with_name("seen.json").read_text())]


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*.py")) if GENERATED not in file.name)


def _counts(file: Path) -> bool:
    """Neither generated nor the door of a room."""
    return GENERATED not in file.name and file.name != "__init__.py"


def _length(file: Path) -> int:
    return len(file.read_text().splitlines())


def _count(files: Iterator[Path] | list[Path]) -> int:
    return sum(map(_length, files))


def _verbs(command: object, path: str = "") -> Iterator[str]:
    for name, each in getattr(command, "commands", {}).items():
        yield from _verbs(each, f"{path} {name}") if hasattr(each, "commands") else [f"{path} {name}"]


def _protocols(files: list[Path]) -> dict[str, int]:
    """How many there are, and the members of those that are large."""
    found: dict[str, int] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                members = ast.FunctionDef | ast.AnnAssign
                found[node.name] = sum(isinstance(each, members) for each in node.body)
    return {"count": len(found)} | {name: size for name, size in sorted(found.items()) if size > LARGEST}


def _lines(figures: dict[str, dict[str, int]]) -> Iterator[str]:
    for section, some in figures.items():
        yield f"[{section}]"
        yield from (f"{name} = {value}" for name, value in some.items())


if __name__ == "__main__":
    sys.exit(main())
