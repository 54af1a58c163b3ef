"""What a function depends on, as a digest: two that are alike in it make the same of the same record."""

import functools
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

_LIBRARIES = ("torch", "torchvision", "torchaudio", "numpy", "PIL", "cv2", "pyarrow", "h5py", "soundfile", "simplejpeg")


class Unidentified(Exception):  # noqa: N818
    """The function depends on something that cannot be looked into; its text says on what."""


def identity(function: Callable[..., Any]) -> str:
    """A digest of its code, of the files beside that, of what it was given beforehand, and of the usual libraries."""
    digest = xxhash.xxh3_128()
    for part in (*_parts(function), *_versions()):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _parts(function: Any) -> Iterator[str]:
    if isinstance(function, functools.partial):
        yield "partial"
        yield _written(function.args, "an argument of a partial")
        yield _written(function.keywords, "an argument of a partial")
        yield from _parts(function.func)
    elif isinstance(function, types.MethodType):
        yield from _state(function.__self__)
        yield from _parts(function.__func__)
    elif isinstance(function, types.FunctionType):
        yield from _of_function(function)
    elif isinstance(function, type | types.BuiltinFunctionType):
        yield f"{function.__module__}.{function.__qualname__}"
        yield from _files(function.__module__)
    else:
        call = type(function).__call__
        yield from _state(function)
        yield from _parts(call)


def _of_function(function: types.FunctionType) -> Iterator[str]:
    code = function.__code__
    yield f"{function.__module__}.{function.__qualname__}"
    yield code.co_code.hex()
    yield repr([constant for constant in code.co_consts if not isinstance(constant, types.CodeType)])
    yield _written(function.__defaults__, "a default")
    yield _written(function.__kwdefaults__, "a default")
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = cell.cell_contents
        yield name
        if callable(value):
            yield from _parts(value)
        else:
            yield _written(value, f"the variable {name}")
    for name in code.co_names:
        value = function.__globals__.get(name)
        if value is not None and not callable(value) and not isinstance(value, types.ModuleType):
            yield name
            yield _written(value, f"the variable {name}")
    yield from _files(function.__module__)


def _state(owner: Any) -> Iterator[str]:
    if isinstance(owner, type):
        yield owner.__qualname__
        return
    yield type(owner).__qualname__
    yield _written(getattr(owner, "__dict__", {}), f"what a {type(owner).__name__} holds")
    yield from _files(type(owner).__module__)


def _files(module: str) -> Iterator[str]:
    """The file of a module and those beside it that were imported, as for a task."""
    home = _file(sys.modules.get(module))
    if home is None:
        raise Unidentified(f"code of {module}, which is in no file")
    yield home.read_text(errors="replace")
    if "site-packages" in home.parts:
        return
    beside = {_file(each) for each in list(sys.modules.values())}
    for file in sorted(each for each in beside if each is not None and each != home):
        if home.parent in file.parents and "site-packages" not in file.parts:
            yield file.read_text(errors="replace")


def _file(module: Any) -> Path | None:
    name = getattr(module, "__file__", None)
    path = Path(name) if isinstance(name, str) else None
    return path if path is not None and path.suffix == ".py" and path.exists() else None


def _written(value: Any, what: str) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise Unidentified(what) from None


def _versions() -> Iterator[str]:
    for name in _LIBRARIES:
        if name in sys.modules:
            yield f"{name} {getattr(sys.modules[name], '__version__', '')}"
    yield sys.version
