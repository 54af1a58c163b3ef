"""Whose code a module is: Python's, an installed package's with its version, or the task's own."""

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Literal

import xxhash

Home = Literal["python", "package", "task"]

_PACKAGES = ("site-packages", "dist-packages")
# By its version also where it is being worked on: the task is one of its classes, and decode() may be a method of it.
_OWN = "quorate"
# Most packages are called like what they give; to list what all of them give takes a second.
_CALLED = {
    "PIL": ("pillow", "pillow-simd"),
    "cv2": ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
    "sklearn": ("scikit-learn",),
    "skimage": ("scikit-image",),
    "yaml": ("pyyaml",),
}
_REQUIRED = re.compile(r"[A-Za-z0-9._-]+")


def home_of(module: str) -> Home:
    """Whose it is. What is installed so that its files stay where they are edited counts as the task's."""
    top = module.partition(".")[0]
    origin = _origin(top)
    if origin is None:
        return "python" if top in sys.stdlib_module_names and top != "__main__" else "task"
    if any(part in _PACKAGES for part in origin.parts) or top == _OWN:
        return "package"
    return "python" if _is_pythons(origin) else "task"


def version_of(module: str) -> str | None:
    """The version of Python or, of a package, of all that it needs; None if it has none."""
    if home_of(module) == "python":
        return sys.version
    return _version_of_package(module.partition(".")[0])


def file_of(module: str) -> str | None:
    """A digest of the file of a module, as it was when it was first asked for; None if it is in none."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    return _digest(Path(origin)) if isinstance(origin, str) else None


def _origin(top: str) -> Path | None:
    """The file of a module, or the folder of a package that has no file."""
    found = sys.modules.get(top)
    if found is None:
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return None
    else:
        if isinstance(file := getattr(found, "__file__", None), str):
            return Path(file)
        spec = getattr(found, "__spec__", None)
    return _origin_of(spec)


def _origin_of(spec: importlib.machinery.ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    if spec.has_location and spec.origin is not None:
        return Path(spec.origin)
    places = list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


@cache
def _is_pythons(origin: Path) -> bool:
    folders = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    return any(folder in origin.resolve().parents for folder in folders)


@cache
def _version_of_package(top: str) -> str | None:
    names = [name for name in _CALLED.get(top, (top,)) if _distribution(name) is not None]
    names = names or importlib.metadata.packages_distributions().get(top, [])
    needed: dict[str, str] = {}
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        found = _distribution(name)
        if found is None or name in needed:
            continue
        needed[name] = found.version
        for line in found.requires or ():
            if (match := _REQUIRED.match(line)) is not None:
                waiting.append(_normal(match[0]))
    return ", ".join(f"{name} {needed[name]}" for name in sorted(needed)) or None


@cache
def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _digest(file: Path) -> str | None:
    try:
        return xxhash.xxh3_128_hexdigest(file.read_bytes()) if file.suffix == ".py" else None
    except OSError:
        return None
