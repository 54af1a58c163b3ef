"""A function of the user's as a process has it that has just begun: of modules that are imported once more."""

import importlib.util
import io
import logging
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from operator import attrgetter
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

from quorate.core.digests import derive_seed
from quorate.core.errors import UnsupportedModelError
from quorate.core.user_code import describe
from quorate.data.streams import seed_generators
from quorate.storage.task_files import import_root, is_own

Main = Callable[..., Any]


def imported_anew(main: Main, seed: int) -> tuple[dict[str, ModuleType], Main]:
    """The same function of a module that is imported once more, with the modules of its project that it imports. One
    that no module has at its top is taken as it is."""
    module = sys.modules.get(main.__module__)
    name = getattr(module, "__file__", None)
    if module is None or name is None or "<locals>" in main.__qualname__:
        return {}, main
    home = f"{import_root(main.__module__, Path(name))}{os.sep}"
    own = {name for name, each in list(sys.modules.items()) if _is_below(each, home)}
    with swapped_modules({}, without=own):
        seed_generators(derive_seed(seed, "import"))
        try:
            spec = importlib.util.spec_from_file_location(main.__module__, name)
            assert spec is not None and spec.loader is not None
            again = sys.modules[main.__module__] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(again)
            found: Main = attrgetter(main.__qualname__)(again)
        except Exception as error:
            raise UnsupportedModelError(
                f"cannot import {main.__module__} once more, as another process would ({describe(error)}). Catch the "
                "error of what can be done only once in a process, or do it under `if __name__ == '__main__':`"
            ) from None
        return {name: each for name, each in list(sys.modules.items()) if _is_below(each, home)}, found


def _is_below(module: ModuleType, home: str) -> bool:
    """Compared as texts: of thousands of modules this is asked again and again."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.startswith(home) and _is_own(file)


@cache
def _is_own(file: str) -> bool:
    """Asked once of each: where libraries are installed below the project, as in its `.venv`, all of them are asked."""
    return is_own(Path(os.path.realpath(file)))


@contextmanager
def swapped_modules(
    modules: Mapping[str, ModuleType], without: Container[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Imports find these modules, and not those that are left out, in this environment, and breakpoints do not stop, as
    of code that a person does not look at; afterwards all is as before."""
    before, variables, hook = dict(sys.modules), dict(os.environ), sys.breakpointhook
    sys.breakpointhook = lambda *_, **__: None
    for name in [name for name in before if name in without]:
        del sys.modules[name]
    sys.modules.update(modules)
    _set_environment(variables if environment is None else environment)
    try:
        yield
    finally:
        sys.breakpointhook = hook
        _set_environment(variables)
        for name in [name for name in list(sys.modules) if name in modules or name in without]:
            del sys.modules[name]
        sys.modules.update({name: each for name, each in before.items() if name in modules or name in without})


@contextmanager
def unheard() -> Iterator[None]:
    """What this thread prints and logs meanwhile is not heard, and handlers of logs are as before in the end."""
    here, give, before = get_ident(), logging.Logger.callHandlers, _handlers()

    def give_of_others(self: logging.Logger, record: logging.LogRecord) -> None:
        if record.thread != here:
            give(self, record)

    logging.Logger.callHandlers = give_of_others  # type: ignore[method-assign]
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.Logger.callHandlers = give  # type: ignore[method-assign]
        for logger, handlers in _handlers().items():
            if handlers != before.get(logger, []):
                logger.handlers = before.get(logger, [])


def _handlers() -> dict[logging.Logger, list[logging.Handler]]:
    loggers = (logging.root, *list(logging.root.manager.loggerDict.values()))
    return {each: list(each.handlers) for each in loggers if isinstance(each, logging.Logger)}


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    # The others stay as they are: other threads read them meanwhile.
    os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
