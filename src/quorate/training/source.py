"""Finding the task that a job file names, and a digest of its source."""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from quorate.core.errors import TaskError
from quorate.core.seeds import derive_seed
from quorate.core.user_code import user_code
from quorate.data.streams import seed_generators
from quorate.training.task import Task


def load_task_type(reference: str, seed: int) -> type[Task]:
    """The class behind ``file.py:Class`` or ``package.module:Class``; what its module draws comes from the seed."""
    seed_generators(derive_seed(seed, "import"))
    place, _, name = reference.rpartition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = getattr(module, name, None)
    if found is None:
        tasks = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Task)]
        tasks = [key for key in tasks if key != "Task"]
        near = difflib.get_close_matches(name, tasks or list(vars(module)), n=1)
        hint = f" Did you mean {near[0]}?" if near else f" Its tasks: {', '.join(tasks)}." if tasks else ""
        raise TaskError(f"task: {place} has no class {name}.{hint}")
    if not isinstance(found, type) or not issubclass(found, Task):
        raise TaskError(f"task: {name} in {place} is not a Task. Write `class {name}(quorate.Task):`.")
    return found


def source_digest(task_type: type[Task]) -> str:
    """Digest of the task's file and of what it imported from the same folder: the code that the bits depend on."""
    home = _folder_of(task_type)
    files = {file for module in list(sys.modules.values()) if (file := _own_file(module, home)) is not None}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(home)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _own_file(module: ModuleType, home: Path) -> Path | None:
    name = getattr(module, "__file__", None)
    # A relative name is an invention of the module's author (torch has one), not a file.
    if not name or not name.endswith(".py") or not name.startswith(os.sep) or "site-packages" in name:
        return None
    file = Path(os.path.realpath(name))
    return file if file.is_relative_to(home) and file.is_file() else None


def _folder_of(task_type: type[Task]) -> Path:
    file = sys.modules[task_type.__module__].__file__
    if file is None:
        raise TaskError(f"task: {task_type.__module__} has no file, so its source cannot be recorded.")
    return Path(file).resolve().parent


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"task: there is no file {path}.")
    # The task's own folder comes first, as for a script: `import my_model` beside the task works.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with user_code(f"importing {path.name}"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise TaskError(f"task: there is no module {name} (searched in: {', '.join(filter(None, sys.path)) or '.'}).")
    with user_code(f"importing {name}"):
        return importlib.import_module(name)
