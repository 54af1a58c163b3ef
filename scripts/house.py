"""How large the house is: lines and files of each room, what a worker imports, keys, verbs, events, protocols, circles.

::

    python scripts/house.py            # show the figures
    python scripts/house.py --check    # fail where one is above house.toml and its headroom
    python scripts/house.py --imports  # the modules of ours that a worker of a plain ring job has
    python scripts/house.py --write    # lower house.toml to what is so now

A landing may lower the figures. One that has to raise them says so by changing house.toml itself. Figures of single
rooms and protocols are shown, and may rise.
"""

import argparse
import ast
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp
import networkx
import typer

import quorate
import quorate.observe.seldom_events
from quorate.cli.app import app
from quorate.observe.event import KINDS
from quorate.spec.job import JobSpec
from quorate.spec.keys import keys_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS, LIMITS = ROOT / "src/quorate", ROOT / "tests", ROOT / "house.toml"
LARGE_PARTS = ROOT / "docs/explanation/large-parts.md"
"""Says why each of them is not divided."""
MOST_LINES, MOST_METHODS, MOST_FIELDS = 50, 25, 15
"""Of a function, and of a class, that is not one of these."""
GENERATED = "_pb2"
LARGE = 6
"""Members of a protocol above which it counts as large."""
HEAD = """\
# The figures of scripts/house.py, none of which may rise by more than its headroom. `--write` lowers them, and leaves
# the headroom as it is.
"""

Figures = dict[str, dict[str, int]]

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
    parser.add_argument("--imports", action="store_true", help="show what a worker of a plain ring job imports")
    options = parser.parse_args()
    if options.imports:
        print("\n".join(sorted(_module_name(file) for file in ring_worker())))
        return 0
    files = _files_of_rooms()
    figures = checked(files)
    if not options.check and not options.write:
        told = [f"# a circle: {', '.join(sorted(each))}" for each in circles()]
        told += [f"# {name}: {size}" for name, size in large(_all(files)).items()]
        print("\n".join([*_lines(figures), *told, *_lines(shown(files))]))
    allowed: Figures = tomllib.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    headroom = allowed.pop("headroom", {})
    risen = _risen(figures, allowed, headroom) if allowed else []
    page = LARGE_PARTS.read_text()
    unexplained = [name for name in large(_all(files)) if f"`{name}`" not in page]
    risen += [f"{name} is large: divide it, or say in {LARGE_PARTS.name} why not" for name in unexplained]
    if risen and (options.check or options.write):
        print("The house has grown:", *risen, sep="\n  ", file=sys.stderr)
        return 1
    if options.write:
        lowered = {
            section: {name: min(value, allowed.get(section, {}).get(name, value)) for name, value in some.items()}
            for section, some in figures.items()
        }
        LIMITS.write_text(HEAD + "\n".join(_lines({**lowered, "headroom": headroom})) + "\n")
    return 0


def _risen(figures: Figures, allowed: Figures, headroom: dict[str, int]) -> list[str]:
    """The figures that are above what is allowed, in words."""
    told = []
    for section, some in figures.items():
        for name, value in some.items():
            limit, room = allowed.get(section, {}).get(name, 0), headroom.get(f"{section}.{name}", 0)
            if value > limit + room:
                told.append(
                    f"{section}.{name}: {value:,}, and house.toml allows {limit:,}" + f" + {room:,}" * bool(room)
                )
    return told


def checked(rooms: dict[str, list[Path]]) -> Figures:
    """The figures that may not rise."""
    whole = _all(rooms)
    imported = [file for file in ring_worker() if _counts(file)]
    sizes = protocols(whole).values()
    return {
        "package": {"lines": _count(whole), "files": len(whole), "largest_file": max(map(_length, whole))},
        "tests": {"lines": _count(_files(TESTS)), "files": len(list(_files(TESTS)))},
        "ring_worker": {"modules": len(imported), "lines": _count(imported)},
        "surface": {
            "keys": len(keys_of(JobSpec)),
            "verbs": sum(1 for _ in _verbs(typer.main.get_command(app))),
            "events": len(KINDS),
        },
        "protocols": {
            "count": len(sizes),
            "large": sum(size > LARGE for size in sizes),
            "most_members": max(sizes),
        },
        "circles": {"count": len(circles()), "modules": sum(map(len, circles()))},
    }


def shown(rooms: dict[str, list[Path]]) -> Figures:
    """The figures of single rooms and protocols."""
    largest = max(_all(rooms), key=_length)
    return {
        "largest_file": {str(largest.relative_to(PACKAGE)): _length(largest)},
        "room_lines": {name: _count(files) for name, files in sorted(rooms.items())},
        "room_files": {name: len(files) for name, files in sorted(rooms.items())},
        "protocol_members": protocols(_all(rooms)),
    }


def _files_of_rooms() -> dict[str, list[Path]]:
    rooms: dict[str, list[Path]] = {}
    for file in _files(PACKAGE):
        rooms.setdefault(file.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(file)
    return rooms


def _all(rooms: dict[str, list[Path]]) -> tuple[Path, ...]:
    return tuple(file for files in rooms.values() for file in files)


@cache
def circles() -> list[set[str]]:
    """The sets of modules of one room that all import each other, directly or not."""
    imports = grimp.build_graph("quorate", cache_dir=None)
    found = []
    for room in sorted(imports.find_children("quorate")):
        inside = {room, *imports.find_descendants(room)}
        graph = networkx.DiGraph(
            (module, other) for module in inside for other in imports.find_modules_directly_imported_by(module) & inside
        )
        found += [each for each in networkx.strongly_connected_components(graph) if len(each) > 1]
    return found


def ring_worker() -> list[Path]:
    """The files of ours that a worker of a plain ring job has imported in a step."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "seen.py"
        task.write_text(TASK)
        job = quorate.Job(task=f"{task}:Seen", batch_size=8, lanes=2, workers=1, steps=2, runs=f"{folder}/runs")
        quorate.train(job, progress=False)
        return [Path(each) for each in json.loads(task.with_name("seen.json").read_text())]


def _module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*.py")) if GENERATED not in file.name)


def _counts(file: Path) -> bool:
    """Neither generated nor the door of a room."""
    return GENERATED not in file.name and file.name != "__init__.py"


def _length(file: Path) -> int:
    return len(file.read_text().splitlines())


def _count(files: Iterable[Path]) -> int:
    return sum(map(_length, files))


def _verbs(command: object, path: str = "") -> Iterator[str]:
    for name, each in getattr(command, "commands", {}).items():
        yield from _verbs(each, f"{path} {name}") if hasattr(each, "commands") else [f"{path} {name}"]


def protocols(files: tuple[Path, ...]) -> dict[str, int]:
    """The members of each."""
    found: dict[str, int] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                members = ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign
                name = ".".join([*file.relative_to(PACKAGE).with_suffix("").parts, node.name])
                found[name] = sum(isinstance(each, members) for each in node.body)
    return found


def large(files: tuple[Path, ...]) -> dict[str, str]:
    """Functions of many lines, and classes of many methods or fields."""
    found: dict[str, str] = {}
    for file in files:
        room = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES:
                    found[f"{room}.{node.name}"] = f"{lines} lines"
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                fields = len(set(_fields(node)))
                if methods > MOST_METHODS or fields > MOST_FIELDS:
                    found[f"{room}.{node.name}"] = f"{methods} methods, {fields} fields"
    return found


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """What is annotated in its body, and what its methods set."""
    for each in node.body:
        is_field = isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
        if is_field and isinstance(each.target, ast.Name):
            yield each.target.id
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            yield each.attr


def _lines(figures: Figures) -> Iterator[str]:
    for section, some in figures.items():
        yield f"[{section}]"
        yield from (f'"{name}" = {value}' if "." in name else f"{name} = {value}" for name, value in some.items())


if __name__ == "__main__":
    sys.exit(main())
