"""The files of a task: which of its project it says that it imports, and how a run's folder keeps them.

::

    source/index.json                 which file is the task's, and where it lay, relative to the run
    source/task.py, source/nets.py    the files, by their names below an import root
"""

import ast
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from quorate.core.errors import JobError
from quorate.core.regular_file import read_regular
from quorate.core.task_source import MOST_KEPT, TaskSource, check_names
from quorate.core.user_code import is_installed
from quorate.storage.atomic import discard, move_into_place, sync_folder, write_new_file

OURS = __name__.partition(".")[0]
"""By its name, wherever it is found: a node of a cluster that runs a copy may see the original as well."""


def files_of(module: str, file: Path, search_path: Sequence[str]) -> dict[str, Path]:
    """A module's file and all that it imports from its project, by their names below an import root.

    By what is written there, also inside functions: the same whenever it is asked, in whichever process.
    """
    finder = _Finder(search_path)
    name = _name(module, file)
    files = {name: file}
    pending = [(module, file)]
    for package in _prefixes(module)[:-1]:
        pending += finder.add(package, files)
    while pending:
        for imported in _imports(*pending.pop()):
            for prefix in _prefixes(imported):
                pending += finder.add(prefix, files)
    return files


def loaded_below(home: Path, modules: Mapping[str, ModuleType]) -> dict[str, Path]:
    """The files of modules that have been imported from below a folder, by names: also those that no text names."""
    found = {}
    for module in list(modules.values()):
        name = getattr(module, "__file__", None)
        # A relative name is an invention of the module's author (torch has one), not a file.
        if isinstance(name, str) and name.startswith(os.sep):
            file = Path(os.path.realpath(name))
            if file.is_relative_to(home) and is_own(file):
                found[str(file.relative_to(home))] = file
    return found


def import_root(module: str, file: Path) -> Path:
    """The folder from which a module is imported by its name."""
    # A file that was loaded by its path may have a dot in its name, and no package around it.
    return file.parent if file.stem == module else file.parents[module.count(".") + (file.name == "__init__.py")]


def locate(module: str) -> Path | None:
    """The file that a module would be imported from; None where there is none."""
    return _file_of(_Finder(sys.path).find(module))


def is_own(file: Path) -> bool:
    """Whether a file (without links in its path) is Python code of somebody's project."""
    return file.suffix == ".py" and not is_installed(file) and file.is_file()


class _Finder:
    def __init__(self, search_path: Sequence[str]) -> None:
        self._search_path = list(search_path)
        self._found: dict[str, ModuleSpec | None] = {}

    def add(self, module: str, files: dict[str, Path]) -> list[tuple[str, Path]]:
        """Add a module of the project, if it is one and is not there yet; what is to be looked into next."""
        if module.partition(".")[0] == OURS:
            return []
        file = _file_of(self.find(module))
        if file is None or file in files.values() or _name(module, file) in files or not is_own(file):
            return []
        files[_name(module, file)] = file
        return [(module, file)]

    def find(self, module: str) -> ModuleSpec | None:
        if module not in self._found:
            package, _, _ = module.rpartition(".")
            path: Sequence[str] | None = self._search_path
            if package:
                parent = self.find(package)
                path = None if parent is None else parent.submodule_search_locations
            self._found[module] = None
            with contextlib.suppress(ImportError, ValueError, OSError):
                self._found[module] = None if path is None else PathFinder.find_spec(module, path)
        return self._found[module]


def _file_of(spec: ModuleSpec | None) -> Path | None:
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    return Path(os.path.realpath(spec.origin))


def _imports(module: str, file: Path) -> Iterator[str]:
    """Names of modules that a file may import; some are names of something else, and are not found."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if package else []
            around = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            yield from ([base] if base else [])
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names if alias.name != "*")


def _prefixes(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _name(module: str, file: Path) -> str:
    if file.stem == module:
        return file.name
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if file.name == "__init__.py" else f"{path}.py"


log = logging.getLogger(__name__)

FOLDER = "source"
INDEX = "index.json"
_WRITING = ".source-"


@dataclass(frozen=True)
class SourcePage:
    """A task's source, and where the task's file was, relative to the run's folder.

    At another place, beside a copy of the run, it lies as one page; nobody has looked yet whose it is.
    """

    source: TaskSource
    found_at: str | None

    @classmethod
    def read(cls, page: bytes) -> "SourcePage | None":
        """From what `to_page` gave. What is no such page is left out: a run can go on by the task itself."""
        try:
            content = json.loads(page)
            return SourcePage(TaskSource.from_json(json.dumps(content["source"])), _checked(content["found_at"]))
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the task's source in the copy of the run is damaged, and is left out: %s", error)
            return None

    def to_page(self) -> bytes:
        page = {"found_at": self.found_at, "source": json.loads(self.source.to_json())}
        return json.dumps(page, indent=1).encode() + b"\n"

    def keep(self, run: Path) -> None:
        """Keep it in a run's folder: from then on it is the task of that run, wherever its own file is gone."""
        temporary = run / f"{_WRITING}{secrets.token_hex(4)}"
        index = {"main": self.source.main, "found_at": self.found_at, "files": sorted(self.source.files)}
        try:
            for left in run.glob(f"{_WRITING}*"):
                discard(left)  # by a launcher that died: whoever writes here holds the run's lock
            # For the owner only: people write passwords and tokens into code, and a runs folder may be for all to read.
            temporary.mkdir(mode=0o700)
            for name, content in self.source.files.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                write_new_file(temporary / name, [content], 0o600)
            write_new_file(temporary / INDEX, [json.dumps(index, indent=1).encode() + b"\n"], 0o600)
            sync_folder(temporary)
            move_into_place(temporary, run / FOLDER)
        except OSError as error:
            raise JobError(f"cannot keep the task's source in {run}: {error.strerror or error}.") from error
        finally:
            discard(temporary)


@dataclass(frozen=True)
class KeptSource(SourcePage):
    """The source that a run keeps, in a folder of its own."""

    folder: Path


def keep_source(run: Path, source: TaskSource, file: Path | None) -> None:
    """Keep a task's source in a run's folder, unless one is kept already; `file` is where the task's file is."""
    if not (run / FOLDER).exists():
        SourcePage(source, None if file is None else os.path.relpath(file, run)).keep(run)


def read_source(run: Path) -> KeptSource | None:
    """The source that a run keeps; None for one that keeps none, or whose folder is not as it was written."""
    folder = run / FOLDER
    try:
        index = json.loads(_read(folder / INDEX))
        names, found_at = list(index["files"]), _checked(index["found_at"])
        check_names(index["main"], names)  # before one of them is read: it may be any file of this machine
        return KeptSource(TaskSource(index["main"], {name: _read(folder / name) for name in names}), found_at, folder)
    except FileNotFoundError as error:
        if folder.exists():
            log.warning("the source that is kept in %s is not complete: %s is missing", folder, error.filename)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the source that is kept in %s cannot be read: %s", folder, error)
    return None


def _read(file: Path) -> bytes:
    size = file.stat().st_size
    if size > MOST_KEPT:
        raise ValueError(f"{file.name} has {size:,} bytes, and no more than {MOST_KEPT:,} are kept")
    return read_regular(file)


def _checked(found_at: object) -> str | None:
    if not isinstance(found_at, str | None):
        raise ValueError(f"found_at is {found_at!r}")
    return found_at
