"""The names that users write are promised: they are added with thought, and not taken away."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import quorate

PROMISED = [
    "Callback",
    "Evaluation",
    "Job",
    "JobFailed",
    "JobFileError",
    "QuorateError",
    "RequestError",
    "Result",
    "RunError",
    "Search",
    "SearchResult",
    "Shards",
    "Stream",
    "Task",
    "TaskError",
    "attention",
    "evaluate",
    "launch",
    "open_run",
    "open_search",
    "resume",
    "train",
    "tune",
    "warm",
]
MODULES = ["ray"]
ROOT = Path(__file__).resolve().parents[2]
STUB = ast.parse((ROOT / "src/quorate/__init__.pyi").read_text())


def test_they_are_these() -> None:
    assert quorate.__all__ == PROMISED
    assert set(PROMISED) <= set(dir(quorate))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(quorate, "trian")  # noqa: B009 (mypy knows that it is not there)


def test_the_version_is_the_installed_one_and_is_read_when_it_is_asked_for() -> None:
    assert quorate.__version__ == version("quorate")
    assert "__version__" in dir(quorate)
    annotated = [ast.unparse(node) for node in STUB.body if isinstance(node, ast.AnnAssign)]
    assert annotated == ["__version__: str"]
    # Without `site`, which imports whatever is installed beside it.
    question = "import sys, quorate; sys.exit('importlib.metadata' in sys.modules)"
    asked = subprocess.run([sys.executable, "-S", "-c", question], env={"PYTHONPATH": str(ROOT / "src")})
    assert asked.returncode == 0


def test_a_version_that_is_not_known_is_an_attribute_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert not hasattr(quorate, "__version__")


@pytest.mark.parametrize("name", PROMISED)
def test_each_is_what_its_name_says_and_is_documented(name: str) -> None:
    value = getattr(quorate, name)
    # `tune` is a package that can be called.
    assert value.__name__.removeprefix("quorate.") == name
    assert inspect.getdoc(value)
    methods = [method for key, method in vars(value).items() if not key.startswith("_")] if name[0].isupper() else []
    assert all(inspect.getdoc(method) for method in methods if callable(method) or isinstance(method, property))


def test_type_checkers_see_the_same_names_at_the_same_homes() -> None:
    imports = {
        alias.asname: (node.module, alias.name)
        for node in STUB.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: (getattr(quorate, name).__module__, name) for name in PROMISED if name != "tune"}
    homes["tune"] = ("quorate.tune.search", "tune")
    assert imports == homes | {name: ("quorate", name) for name in MODULES}
    (assignment,) = (node for node in STUB.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(assignment.value) == PROMISED


def test_what_is_for_ray_is_imported_without_ray() -> None:
    question = "import sys, quorate; quorate.ray.trainer; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", question]).returncode == 0
