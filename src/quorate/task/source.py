"""Finding the task that a job file names, and its source."""

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from quorate.core.digests import derive_seed
from quorate.core.errors import TaskError, UserCodeError
from quorate.core.task_source import TaskSource
from quorate.core.user_code import building_code, given, is_installed
from quorate.data.streams import seed_generators
from quorate.spec.keys import one_of
from quorate.storage.task_files import files_of, import_root, loaded_below
from quorate.task.task import Task

METHODS = {
    "model": "def model(self):                # return a torch.nn.Module",
    "datasets": "def datasets(self):             # return training set[, validation set]",
    "loss": "def loss(self, model, batch):   # return a tensor with one element",
    "optimizer": "def optimizer(self, model):     # return an optimizer of its parameters",
}


def load_task_type(reference: str, seed: int) -> type[Task]:
    """The class behind ``file.py:Class`` or ``package.module:Class``; what its module draws comes from the seed."""
    seed_generators(import_seed(seed))
    module, place, name = _imported_for(reference)
    found = getattr(module, name, None)
    if isinstance(found, FunctionType):
        if inspect.iscoroutinefunction(found):
            raise TaskError(f"task: {name}() is `async def`, and nobody awaits it. Write `def {name}(run):`.")
        # Most jobs have none; it stands on the training loop, and so is found by its name like an option.
        own_loop: type[Task] = importlib.import_module("quorate.own_loop.loop").own_loop_of(found)
        return own_loop
    if not isinstance(found, type) or not issubclass(found, Task) or found is Task:
        raise TaskError(f"task: {_not_a_task(module, place, name)}")
    _refuse_unfinished(found, place)
    _refuse_misshapen(found, place)
    return found


def load_dataset(reference: str) -> Any:
    """What the function behind ``file.py:function`` or ``package.module:function`` gives."""
    module, place, name = _imported_for(reference)
    function = getattr(module, name, None)
    if not callable(function):
        raise TaskError(f"{place} has no function {name} that could give a dataset.")
    with building_code(f"{name}()"):
        return function()


def _imported_for(reference: str) -> tuple[ModuleType, str, str]:
    """The module of a reference, its place and the name that is meant there."""
    place, _, name = reference.rpartition(":")
    return _import_file(Path(place).absolute()) if place.endswith(".py") else _import_module(place), place, name


def import_seed(seed: int) -> int:
    """What generators begin with when the task is imported."""
    return derive_seed(seed, "import")


def _not_a_task(module: ModuleType, place: str, name: str) -> str:
    tasks = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value is not Task
    ]
    # What is imported from elsewhere is seldom meant.
    tasks = [key for key in tasks if getattr(module, key).__module__ == module.__name__] or tasks
    near = difflib.get_close_matches(name, tasks, n=1)
    others = f"Did you mean {near[0]}?" if near else f"Its tasks: {', '.join(tasks)}." if tasks else ""
    if not hasattr(module, name):
        return f"{place} has no class {name}. {others or f'Write `class {name}(quorate.Task):` there.'}"
    found = getattr(module, name)
    if found is Task:
        return f"{name} in {place} is the class that tasks are made from. {others or 'Name the class of your own.'}"
    if not isinstance(found, type):
        remedy = others or "A task is a class: `class MyTask(quorate.Task):`."
        return f"{name} in {place} is {given(found)}, not a class. {remedy}"
    return f"{name} in {place} is a class but not a task. {others or f'Write `class {name}(quorate.Task):`.'}"


def _refuse_unfinished(task_type: type[Task], place: str) -> None:
    """Told before a worker is started, and all at once: each would otherwise show one by one."""
    missing = [method for method in METHODS if getattr(task_type, method) is getattr(Task, method)]
    if not missing:
        return
    names = one_of([f"{method}()" for method in missing])
    lines = "".join(f"\n    {METHODS[method]}" for method in missing)
    raise TaskError(f"{place}: class {task_type.__name__} has no {names}. A task needs{lines}")


def _refuse_misshapen(task_type: type[Task], place: str) -> None:
    """What could not be called as it will be: an exception there would speak of our call."""
    name = task_type.__name__
    for method in (method for method in dir(Task) if not method.startswith("_")):
        own, usual = (inspect.getattr_static(each, method) for each in (task_type, Task))
        if own is usual or not isinstance(own, FunctionType):
            continue
        if inspect.iscoroutinefunction(own):
            raise TaskError(f"{place}: {method}() of class {name} is `async def`, and nobody awaits it. Write `def`.")
        wanted = list(inspect.signature(usual).parameters)
        if not _takes(own, wanted):
            has = ", ".join(inspect.signature(own, follow_wrapped=False).parameters)
            raise TaskError(
                f"{place}: {method}({has}) of class {name} does not take what it is given. Write "
                f"`def {method}({', '.join(wanted)}):`."
            )
    own = inspect.getattr_static(task_type, "__init__")
    if isinstance(own, FunctionType) and not _takes(own, ["self"]):
        has = ", ".join(list(inspect.signature(own, follow_wrapped=False).parameters)[1:])
        raise TaskError(
            f"{place}: __init__() of class {name} takes {has}, and a task is made without arguments. What the job's "
            "`params` set stands in the class, with its type, such as `width: int = 32`: leave __init__() out."
        )


def _takes(method: FunctionType, arguments: Sequence[str]) -> bool:
    try:
        inspect.signature(method, follow_wrapped=False).bind(*arguments)
    except TypeError:
        return False
    return True


def task_source(task_type: type[Task]) -> TaskSource:
    """The task's file and what it imports of its project: the code that the bits depend on."""
    return _read_source(task_type)[0]


def source_files(task_type: type[Task]) -> list[Path]:
    """Where the files of it lie; the task's own is the first."""
    return list(_read_source(task_type)[1].values())


_sources: dict[type[Task], tuple[TaskSource, dict[str, Path]]] = {}


def _read_source(task_type: type[Task]) -> tuple[TaskSource, dict[str, Path]]:
    """Once: a forked worker runs the code that was imported, whatever stands in the files by then."""
    if task_type not in _sources:
        files = _find_files(task_type)
        source = TaskSource(next(iter(files)), {name: path.read_bytes() for name, path in files.items()})
        _sources[task_type] = source, files
    return _sources[task_type]


def changed_file(task_type: type[Task]) -> Path | None:
    """A file of the task's source that is not what it was when that was read, or is found elsewhere, as after a link
    was set anew; None where all are."""
    source, known = _read_source(task_type)
    importlib.invalidate_caches()
    for name, path in (known | files_of(*_place_of(task_type), sys.path)).items():
        if path != known.get(name) or _content(path) != source.files[name]:
            return path
    return None


def imported_versions(source: TaskSource) -> dict[str, str]:
    """The versions of the installed packages that a task's source imports, as far as they are known, by the names of
    their modules: what `transformers` computes is no code of the task's, and yet the bits depend on it."""
    own = {name.partition("/")[0].removesuffix(".py") for name in source.files}
    names = {name for content in source.files.values() for name in _imported(content)}
    found = {name: _version(name) for name in sorted(names - own - sys.stdlib_module_names - _RECORDED)}
    return {name: version for name, version in found.items() if version}


def package_digest(task_type: type[Task]) -> str | None:
    """Of the code around a task that was installed with a package, of which its source has only the task's own file;
    None for any other task."""
    module, file = _place_of(task_type)
    if not is_installed(file) or "." not in module:
        return None
    top, total = import_root(module, file) / module.partition(".")[0], hashlib.sha256()
    for path in sorted(path for path in top.rglob("*") if path.suffix in (".py", ".so")):
        total.update(f"{path.relative_to(top)} {hashlib.sha256(_content(path) or b'').hexdigest()}\n".encode())
    return f"{_version(top.name)} {total.hexdigest()}"


_RECORDED = {"quorate", "torch", "numpy"}


def _imported(content: bytes) -> Iterator[str]:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def _version(module: str) -> str:
    """By the name of the module, which most packages have, too; whoever has another one may say it when loaded. (Which
    package a module is of is written nowhere: to look through all of them takes half a second.)"""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(module), "__version__", None) or "")


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:  # it is gone, or was made unreadable
        return None


def _find_files(task_type: type[Task]) -> dict[str, Path]:
    """By name; the task's own is the first."""
    module, file = _place_of(task_type)
    files = files_of(module, file, sys.path)
    # Modules that are imported by a name that is computed stand in no text.
    loaded = loaded_below(import_root(module, file), sys.modules)
    known = set(files.values())
    files |= {name: path for name, path in loaded.items() if path not in known and name not in files}
    return files


def _place_of(task_type: type[Task]) -> tuple[str, Path]:
    """The name of its module, and the file of that, without links in its path."""
    module = sys.modules[task_type.__module__]
    place = getattr(module, "__file__", None)
    if place is None:
        raise TaskError(f"task: {module.__name__} has no file, so its source cannot be recorded.")
    return module.__name__, Path(os.path.realpath(place))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TaskError(f"task: there is no file {path}.")
    # The task's own folder comes first, as for a script: `import my_model` beside the task works.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with building_code(f"importing {path.name}"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    try:
        with building_code(f"importing {name}"):
            return importlib.import_module(name)
    except UserCodeError as error:
        absent = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        # Only if it is the module itself, or a package around it: not what the module imports in its turn.
        if absent is None or not f"{name}.".startswith(f"{absent}."):
            raise
        raise TaskError(
            f"task: there is no module {name}: it is neither installed nor in {_own_search_path()}. "
            f"PYTHONPATH=. adds this folder; for a file, write {name.replace('.', '/')}.py:Class."
        ) from None


def _own_search_path() -> str:
    """Where Python looks besides its own library and what is installed: what a person may have got wrong."""
    own = [entry for entry in sys.path if entry and not entry.startswith(sys.base_prefix)]
    return ", ".join(entry for entry in own if "site-packages" not in entry) or "any folder that Python looks into"
