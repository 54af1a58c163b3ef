"""Which files of a person's own project a module imports, found without importing anything.

What is installed, belongs to Python or to Quorate is no part of a project.
"""

import ast
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from quorate.core.user_code import is_installed

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
