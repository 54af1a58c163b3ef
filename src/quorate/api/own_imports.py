"""Modules of a task that is loaded into a person's own process, where others of the same names may be: of another run,
or of the project as it is now."""

import builtins
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from quorate.storage.project_files import is_own

# `sys.path` and `sys.modules` are the process's: two loads at once would undo each other's changes.
_turn = threading.RLock()


class OwnImports:
    """What is imported from below one folder, by the code that lies there, whenever that imports it.

    Within `active` the folder comes first, and modules of other projects that have names of its own are out of the way;
    afterwards all is as it was. What its code imports later, inside a function, is found in the same way: its modules
    have an `__import__` of their own. Those of an `isolated` folder are never seen by anybody else; those of a person's
    project stay in `sys.modules` where they are in nobody's way, so that pickle finds them.
    """

    def __init__(self, folder: Path, *, isolated: bool) -> None:
        self._folder = os.path.realpath(folder)
        self._isolated = isolated
        self._path = [str(folder)]
        self._modules: dict[str, ModuleType] = {}
        self._is_active = False
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """For a `with` block around whatever imports or builds something of it."""
        with _turn:
            if self._is_active:
                yield
                return
            path, finder = list(sys.path), _Finder(self)
            rivals = self._rivals()
            for name in rivals:
                del sys.modules[name]
            sys.modules.update(self._modules)
            sys.path[:0] = self._path
            sys.meta_path.insert(0, finder)
            self._is_active = True
            try:
                yield
            finally:
                self._is_active = False
                sys.meta_path.remove(finder)
                self._path = [entry for entry in sys.path if entry not in path]
                sys.path[:] = path
                self._modules = {name: module for name, module in list(sys.modules.items()) if self._has(module)}
                for name in self._modules if self._isolated else self._modules.keys() & rivals.keys():
                    del sys.modules[name]
                sys.modules.update(rivals)

    def is_below(self, file: str) -> bool:
        """Whether a file lies in the folder."""
        return os.path.realpath(file).startswith(self._folder + os.sep)

    def _import(self, *given: Any, **named: Any) -> Any:
        with self.active():
            return builtins.__import__(*given, **named)

    def _has(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and self.is_below(file) and is_own(Path(os.path.realpath(file)))

    def _rivals(self) -> dict[str, ModuleType]:
        """Modules of other projects by the names that modules of this folder have."""
        names = {entry.name.removesuffix(".py") for entry in Path(self._folder).iterdir()}
        found = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in names}
        return {name: module for name, module in found.items() if self._is_rival(name, module)}

    def _is_rival(self, name: str, module: ModuleType) -> bool:
        if name in self._modules:
            return module is not self._modules[name]
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(file, str) or self.is_below(file):
            return False
        top = Path(self._folder) / name.partition(".")[0]
        is_here = top.with_suffix(".py").is_file() or (top / "__init__.py").is_file()
        # A project may have a random.py; whoever has imported Python's own goes on to use that.
        return is_here and is_own(Path(os.path.realpath(file)))


class _Finder:
    """Gives modules of a folder its `__import__`, before their code runs: a function keeps what it was made with."""

    def __init__(self, imports: OwnImports) -> None:
        self._imports = imports

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """That of a module in the folder; others are for others to find."""
        found = PathFinder.find_spec(name, path, target)
        if found is None or found.origin is None or type(found.loader) is not SourceFileLoader:
            return None
        if not self._imports.is_below(found.origin):
            return None
        loader = _Loader(name, found.origin)
        loader.builtins = self._imports.builtins
        locations = found.submodule_search_locations
        return spec_from_file_location(name, found.origin, loader=loader, submodule_search_locations=locations)


class _Loader(SourceFileLoader):
    builtins: dict[str, Any]

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self.builtins
        super().exec_module(module)
