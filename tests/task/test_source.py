"""Finding the task, and noticing when its code has changed."""

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorate.core.errors import TaskError, UserCodeError
from quorate.core.task_source import TaskSource
from quorate.task.source import changed_file, imported_versions, load_task_type, task_source
from quorate.task.task import Task

TASK = """
import quorate
{extra}
class Digits(quorate.Task):
    def model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
    def optimizer(self, model): ...
class Half(Digits):
    model = quorate.Task.model
    loss = quorate.Task.loss
class Points:
    pass
Task = quorate.Task
number = 3
def function():
    pass
"""
numbers = itertools.count()


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, extra: str = "", name: str | None = None) -> Path:
    # A name of its own for each file: Python keeps a module under its name.
    file = folder / (name or f"task_{next(numbers)}.py")
    file.write_text(TASK.format(extra=extra))
    return file


def forget(*files: Path) -> None:
    for file in files:
        sys.modules.pop(file.stem, None)


def test_a_class_in_a_file(tmp_path: Path) -> None:
    found = load_task_type(f"{write(tmp_path)}:Digits", 0)
    assert issubclass(found, Task)
    assert found.__name__ == "Digits"


def test_a_class_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / f"package_{next(numbers)}"
    package.mkdir()
    write(package, name="inner.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_task_type(f"{package.name}.inner:Digits", 0).__module__ == f"{package.name}.inner"


def test_a_file_imports_what_stands_beside_it(tmp_path: Path) -> None:
    beside = write(tmp_path)
    file = write(tmp_path, f"import {beside.stem}")
    assert load_task_type(f"{file}:Digits", 0).__module__ == file.stem
    assert Path(str(sys.modules[beside.stem].__file__)) == beside


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Digit", "has no class Digit. Did you mean Digits"),
        ("Unlike", "has no class Unlike. Its tasks: Digits, Half"),
        ("number", "number in .* is the int 3, not a class. Its tasks: Digits, Half"),
        ("function", r"function\(\) must take `run` first"),
        ("quorate", "quorate in .* is a module, not a class. Its tasks"),
        ("Points", "Points in .* is a class but not a task. Its tasks: Digits"),
        ("Task", "Task in .* is the class that tasks are made from. Its tasks"),
    ],
)
def test_a_class_that_is_not_there_or_not_a_task(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=text):
        load_task_type(f"{write(tmp_path)}:{name}", 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Digits", r"has no class Digits\. Write `class Digits\(quorate\.Task\):` there"),
        ("Points", r"Points in .* is a class but not a task\. Write `class Points\(quorate\.Task\):`"),
        ("nn", r"nn in .* is a module, not a class\. A task is a class: `class MyTask\(quorate\.Task\):`"),
    ],
)
def test_a_module_without_any_task_says_what_to_write(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"empty_{next(numbers)}.py"
    file.write_text("from torch import nn\nclass Points: ...\n")
    with pytest.raises(TaskError, match=text):
        load_task_type(f"{file}:{name}", 0)


def test_a_task_without_a_method_is_told_all_that_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as raised:
        load_task_type(f"{write(tmp_path)}:Half", 0)
    first, *lines = str(raised.value).split("\n")
    assert first.endswith(".py: class Half has no model() or loss(). A task needs")
    assert [line.split("(")[0] for line in lines] == ["    def model", "    def loss"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def loss(model, batch): ...", "loss(model, batch) of class Mine does not take what it is given"),
        ("def loss(model, batch): ...", "Write `def loss(self, model, batch):`."),
        ("async def loss(self, model, batch): ...", "loss() of class Mine is `async def`, and nobody awaits it"),
        (
            "def __init__(self, width): ...",
            "__init__() of class Mine takes width, and a task is made without arguments",
        ),
        ("def __init__(self, width=3): ...", ""),
        ("@staticmethod\n    def loss(model, batch): ...", ""),
        ("def loss(self, model, batch, weight=1.0): ...", ""),
        ("def loss(self, *given): ...", ""),
    ],
)
def test_a_method_that_could_not_be_called_is_refused(body: str, told: str, tmp_path: Path) -> None:
    file = write(tmp_path)
    file.write_text(f"{file.read_text()}\nclass Mine(Digits):\n    {body}\n")
    if not told:
        load_task_type(f"{file}:Mine", 0)
        return
    with pytest.raises(TaskError, match=re.escape(told)):
        load_task_type(f"{file}:Mine", 0)


def test_a_loop_that_would_have_to_be_awaited_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "awaited.py"
    file.write_text("async def main(run): ...")
    with pytest.raises(TaskError, match="is `async def`"):
        load_task_type(f"{file}:main", 0)


def test_a_file_or_module_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no file .*absent\.py"):
        load_task_type(f"{tmp_path}/absent.py:Digits", 0)
    for module in ("absent_module", "absent_package.module"):
        with pytest.raises(TaskError, match=f"no module {module}: it is neither installed nor in .*PYTHONPATH=\\."):
            load_task_type(f"{module}:Digits", 0)


@pytest.mark.parametrize("how", ["file", "module"])
def test_an_import_that_fails_shows_the_users_traceback(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "import a_library_that_is_not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserCodeError, match=r"a_library_that_is_not_installed.*in importing") as raised:
        load_task_type(f"{file if how == 'file' else file.stem}:Digits", 0)
    lines = raised.value.traceback.splitlines()
    assert str(file) in lines[1]
    assert "import a_library_that_is_not_installed" in lines[2]


class TestTaskSource:
    def load(self, file: Path, *beside: Path) -> TaskSource:
        forget(file, *beside)
        return task_source(load_task_type(f"{file}:Digits", 0))

    def test_it_changes_with_the_code_of_the_tasks_file_and_only_then(self, tmp_path: Path) -> None:
        file = write(tmp_path)
        before = self.load(file)
        assert self.load(file) == before
        file.write_text(f"# another word\n\n{file.read_text()}")
        commented = self.load(file)
        assert (commented.digest, commented == before) == (before.digest, False)
        file.write_text(f"{file.read_text()}\nx = 1\n")
        assert self.load(file).digest != before.digest

    def test_it_has_what_the_task_imports_from_its_project_also_inside_a_function(self, tmp_path: Path) -> None:
        folder = tmp_path / "parts"
        folder.mkdir()
        beside, below, late, inner = write(tmp_path), write(folder), write(tmp_path), write(tmp_path)
        late.write_text(f"from {inner.stem} import number\n")
        lines = f"import {beside.stem}\nimport parts.{below.stem}, json\ndef later():\n    import {late.stem}\n"
        file = write(tmp_path, lines)
        before = self.load(file, beside)
        assert before.files.keys() == {file.name, beside.name, f"parts/{below.name}", late.name, inner.name}
        for changed in (beside, below, late, inner):
            text = changed.read_text()
            changed.write_text(f"{text}\nx = 1\n")
            assert self.load(file, beside).digest != before.digest
            changed.write_text(text)
        assert self.load(file, beside) == before

    def test_a_module_that_is_imported_by_a_computed_name_is_in_it(self, tmp_path: Path) -> None:
        beside = write(tmp_path)
        file = write(tmp_path, f"import importlib\nimportlib.import_module({beside.stem[:3]!r} + {beside.stem[3:]!r})")
        assert self.load(file, beside).files.keys() == {file.name, beside.name}

    def test_it_has_the_packages_around_a_module_and_what_they_import(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / f"package_{next(numbers)}"
        (package / "tasks").mkdir(parents=True)
        for name in ("__init__.py", "nets.py", "tasks/__init__.py", "tasks/losses.py", "unused.py"):
            (package / name).write_text("")
        write(package / "tasks", "from .. import nets\nfrom .losses import *", name="digits.py")
        monkeypatch.syspath_prepend(str(tmp_path))
        source = task_source(load_task_type(f"{package.name}.tasks.digits:Digits", 0))
        assert source.main == f"{package.name}/tasks/digits.py"
        names = ("__init__.py", "nets.py", "tasks/__init__.py", "tasks/losses.py", "tasks/digits.py")
        assert source.files.keys() == {f"{package.name}/{name}" for name in names}

    def test_it_has_nothing_that_the_task_does_not_import(self, tmp_path: Path) -> None:
        file = write(tmp_path)
        before = self.load(file)
        write(tmp_path)
        (tmp_path / "data.csv").write_text("1,2")
        elsewhere = tmp_path.parent / f"elsewhere_{next(numbers)}"
        elsewhere.mkdir()
        load_task_type(f"{write(elsewhere)}:Digits", 0)
        assert self.load(file) == before
        assert before.files.keys() == {file.name}, "neither torch nor quorate"

    def test_its_digest_does_not_change_when_the_folder_moves_or_the_file_is_renamed(self, tmp_path: Path) -> None:
        home, other = tmp_path / "home", tmp_path / "other"
        home.mkdir()
        other.mkdir()
        file = write(home)
        before = self.load(file)
        moved = file.rename(other / file.name)
        assert self.load(moved) == before
        renamed = moved.rename(other / f"renamed.{file.name}")
        assert self.load(renamed).digest == before.digest

    def test_it_is_of_the_code_that_was_imported_whatever_the_file_says_later(self, tmp_path: Path) -> None:
        file = write(tmp_path)
        task_type = load_task_type(f"{file}:Digits", 0)
        before = task_source(task_type)
        file.write_text("changed = True")
        assert task_source(task_type) is before

    def test_a_task_without_a_file_is_refused(self) -> None:
        module = type(sys)("made_up")
        module.__file__ = None
        sys.modules["made_up"] = module
        task_type = type("Digits", (Task,), {"__module__": "made_up"})
        with pytest.raises(TaskError, match="made_up has no file"):
            task_source(task_type)


def test_a_library_that_a_package_lacks_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / f"package_{next(numbers)}"
    package.mkdir()
    (package / "__init__.py").write_text("import a_library_that_is_not_installed\n")
    write(package, name="inner.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserCodeError, match=r"a_library_that_is_not_installed.*in importing"):
        load_task_type(f"{package.name}.inner:Digits", 0)


def test_a_file_that_is_edited_gone_or_found_elsewhere_has_changed(tmp_path: Path) -> None:
    beside = tmp_path / f"beside_{next(numbers)}.py"
    beside.write_text("x = 1\n")
    late = tmp_path / f"late_{next(numbers)}.py"
    extra = f"import {beside.stem}\ntry:\n    import {late.stem}\nexcept ImportError:\n    pass\n"
    one, other = write(tmp_path, extra), write(tmp_path, extra)
    link = tmp_path / f"link_{next(numbers)}.py"
    link.symlink_to(one)
    task = load_task_type(f"{link}:Digits", 0)
    assert changed_file(task) is None

    beside.write_text("x = 2\n")
    assert changed_file(task) == beside
    beside.unlink()
    assert changed_file(task) == beside
    beside.write_text("x = 1\n")
    late.write_text("")
    assert changed_file(task) == late
    late.unlink()
    assert changed_file(task) is None
    link.unlink()
    link.symlink_to(other)
    assert changed_file(task) is not None


def test_the_versions_of_what_a_source_imports_are_known() -> None:
    files = {
        "job.py": b"import yaml.nodes, os, own, torch\nfrom . import near\ndef f():\n    import pytest\n",
        "own.py": b"import near, absent_from_here\n",
        "broken.py": b"import (",
    }
    importlib.import_module("yaml")
    found = imported_versions(TaskSource("job.py", files))
    assert found.keys() == {"pytest", "yaml"}
    assert found["pytest"] == pytest.__version__
