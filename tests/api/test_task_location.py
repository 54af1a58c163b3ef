"""Where the task of a run is found, when it is not where it was."""

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quorate.api.tasks import TaskLocation, find_task, is_other_code, keep_task, refuse_other_code, warn_of_other_code
from quorate.core import task_source
from quorate.core.errors import RunError
from quorate.core.task_source import TaskSource
from quorate.engines.engine import Prepared
from quorate.storage.run_folder import RunFolder
from quorate.storage.task_files import keep_source, read_source

TASK = "import nets_of_mine\nimport quorate\n\nclass Mine(quorate.Task):\n    rate = nets_of_mine.RATE\n"
METHODS = "".join(f"    def {name}(self, *_): ...\n" for name in ("model", "datasets", "loss", "optimizer"))


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("task_of_mine", "nets_of_mine", "rest_of_mine", "pack", "pack.inner"):
        sys.modules.pop(name, None)


def loaded(place: TaskLocation) -> Any:
    with place.loaded(0) as task_type:
        return task_type


def project(folder: Path, rate: float = 0.1) -> RunFolder:
    """A project with a run that keeps the source of its task."""
    run = folder / "runs" / "mine-0001"
    run.mkdir(parents=True)
    (folder / "task_of_mine.py").write_text(TASK + METHODS)
    (folder / "nets_of_mine.py").write_text(f"RATE = {rate}\n")
    names = ("task_of_mine.py", "nets_of_mine.py")
    source = TaskSource(names[0], {name: (folder / name).read_bytes() for name in names})
    keep_source(run, source, folder / names[0])
    return RunFolder(run)


def prepared(source: TaskSource, python: str = "3.11") -> Prepared:
    return Prepared({"python": python, "task source": source.digest}, source)


def test_it_is_where_the_job_says_or_where_it_is_asked_for(tmp_path: Path) -> None:
    run = project(tmp_path)
    recorded = f"{tmp_path}/task_of_mine.py:Mine"
    assert find_task(run, recorded) == TaskLocation(recorded)
    assert find_task(run, recorded, recorded) == TaskLocation(recorded)
    assert find_task(run, "/gone.py:Mine", "/other.py:Mine") == TaskLocation("/other.py:Mine")
    assert find_task(run, "quorate.core.errors:Mine") == TaskLocation("quorate.core.errors:Mine")


def test_a_project_that_was_moved_with_its_runs_has_it_where_it_lay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = project(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = RunFolder(tmp_path / "new" / "runs" / run.name)
    place = find_task(moved, f"{tmp_path}/old/task_of_mine.py:Mine")
    assert place == TaskLocation(f"{tmp_path}/new/task_of_mine.py:Mine")
    assert f"no longer at {tmp_path}/old/task_of_mine.py: the one at {tmp_path}/new/task_of_mine.py" in caplog.text
    (tmp_path / "new" / "nets_of_mine.py").write_text("RATE = 0.1  # slow\n")
    assert find_task(moved, f"{tmp_path}/old/task_of_mine.py:Mine") == place, "comments do not count"


def test_a_project_that_was_copied_with_its_runs_uses_its_own_copy_and_says_if_that_was_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = project(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    copied = RunFolder(tmp_path / "copy" / "runs" / run.name)
    recorded = f"{tmp_path}/old/task_of_mine.py:Mine"
    assert find_task(run, recorded) == TaskLocation(recorded)
    assert find_task(copied, recorded).reference == f"{tmp_path}/copy/task_of_mine.py:Mine"
    assert caplog.text == ""
    (tmp_path / "copy" / "nets_of_mine.py").write_text("RATE = 0.2\n")
    assert find_task(copied, recorded) == TaskLocation(recorded)
    assert "is used, as recorded, and " in caplog.text
    assert "copy/task_of_mine.py has other code" in caplog.text


@pytest.mark.parametrize("other", ["task_of_mine.py", "nets_of_mine.py"])
def test_another_projects_file_in_that_place_is_not_taken_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    run = project(tmp_path)
    (tmp_path / other).write_text("x = 1\n")
    place = find_task(run, "/gone/task_of_mine.py:Mine")
    assert place.reference == f"{run.path}/source/task_of_mine.py:Mine"
    assert place.search_path[0] == f"{run.path}/source"
    assert f"/gone/task_of_mine.py is no longer there, and {tmp_path}/task_of_mine.py has other code" in caplog.text


def test_without_a_file_the_kept_source_is_the_task_each_run_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates = (0.1, 0.2)
    for rate in rates:
        run = project(tmp_path / str(rate), rate)
        for file in (tmp_path / str(rate)).glob("*.py"):
            file.unlink()
        task_type = loaded(find_task(run, "/gone/task_of_mine.py:Mine"))
        assert task_type.rate == rate, "not what the run before has left in sys.modules"
    assert caplog.text.count("the source that the run keeps is used") == len(rates)
    assert "--task FILE:Class names another" in caplog.text


def test_a_module_that_is_not_installed_any_more_is_taken_from_the_kept_source(tmp_path: Path) -> None:
    source = TaskSource("pack/inner.py", {"pack/inner.py": (TASK + METHODS).encode(), "nets_of_mine.py": b"RATE = 3\n"})
    keep_source(tmp_path, source, None)
    place = find_task(RunFolder(tmp_path), "pack.inner:Mine")
    assert (place.reference, place.search_path[0]) == ("pack.inner:Mine", f"{tmp_path}/source")
    assert loaded(place).rate == 3


def test_a_run_that_keeps_nothing_leaves_the_task_where_it_was(tmp_path: Path) -> None:
    assert find_task(RunFolder(tmp_path), "/gone/task.py:Mine") == TaskLocation("/gone/task.py:Mine")


def test_other_code_is_refused_with_the_difference_and_the_same_is_not(tmp_path: Path) -> None:
    run = project(tmp_path)
    now = TaskSource("task_of_mine.py", {name: (tmp_path / name).read_bytes() for name in ("task_of_mine.py",)})
    then = TaskSource("task_of_mine.py", {**now.files, "nets_of_mine.py": b"RATE = 0.1\n"})
    recorded = {"task source": then.digest, "python": "3.11"}
    commented = replace(then, files={**then.files, "nets_of_mine.py": b"RATE = 0.1  # slow\n"})
    refuse_other_code(run, recorded, prepared(commented), "Undo it.")
    with pytest.raises(RunError) as refused:
        refuse_other_code(run, recorded, prepared(now), "Undo it.")
    first, *lines = refused.value.message.split("\n")
    assert first.endswith("so its results would differ. Undo it. What differs:")
    assert lines[0] == f"  --- nets_of_mine.py (kept in {run.path})"
    assert "  -RATE = 0.1" in lines


def test_the_same_text_under_another_python_is_the_same_code(tmp_path: Path) -> None:
    run = project(tmp_path)
    then = TaskSource("task_of_mine.py", {f.name: f.read_bytes() for f in tmp_path.glob("*.py")})
    recorded = {"task source": "code-1:another tree", "python": "3.11"}
    assert not is_other_code(run, recorded, prepared(then, "3.99"))
    assert is_other_code(run, recorded, prepared(then)), "a kept source that was edited"


@pytest.mark.parametrize(
    ("recorded", "text"),
    [
        ("ab" * 32, "begun by an earlier version of Quorate, which recorded the text"),
        ("code-1:" + "ab" * 32, "Its digest was abababababab… then and is .*… now; the run keeps no source"),
    ],
)
def test_without_a_kept_source_the_digests_are_told(tmp_path: Path, recorded: str, text: str) -> None:
    now = prepared(TaskSource("t.py", {"t.py": b""}))
    with pytest.raises(RunError, match=text):
        refuse_other_code(RunFolder(tmp_path), {"task source": recorded}, now, "Undo it.")


def test_too_much_source_is_not_kept_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = TaskSource("t.py", {"t.py": b"x = 1\n"})
    assert source.to_page() == source.to_json()
    monkeypatch.setattr(task_source, "MOST_KEPT", 5)
    assert source.to_page() is None
    keep_task(RunFolder(tmp_path), "/t.py:T", None, TaskLocation("/t.py:T"))
    assert list(tmp_path.iterdir()) == []
    assert "the task's source is not kept in the run: it has more than 4,194,304 bytes" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("kept", [(True, True), (True, False), (False, True), (False, False)])
def test_each_run_has_its_own_modules_and_the_process_has_what_it_had(tmp_path: Path, kept: tuple[bool, bool]) -> None:
    tasks = []
    before, others = list(sys.path), sys.modules.get("nets_of_mine")
    for number, is_kept in enumerate(kept):
        folder, rate = tmp_path / str(number), number + 0.5
        run = project(folder, rate)
        (folder / "task_of_mine.py").write_text(TASK + METHODS)
        reference = f"{folder}/task_of_mine.py:Mine"
        if is_kept:
            files = {file.name: file.read_bytes() for file in folder.glob("*.py")}
            shutil.rmtree(run.path / "source")
            keep_source(run.path, TaskSource("task_of_mine.py", files), None)
            reference = "/gone/task_of_mine.py:Mine"
        tasks.append(loaded(find_task(run, reference)))
        assert sys.path == before
    assert [task.rate for task in tasks] == [0.5, 1.5]
    if all(kept):
        assert sys.modules.get("nets_of_mine") is others


def test_what_a_person_has_imported_is_as_it_was_and_is_shared_with_the_project_in_place(tmp_path: Path) -> None:
    run = project(tmp_path, 0.5)
    sys.path.insert(0, str(tmp_path))
    import nets_of_mine  # type: ignore[import-not-found]

    nets_of_mine.RATE = 9
    assert loaded(find_task(run, f"{tmp_path}/task_of_mine.py:Mine")).rate == 9, "the very module"
    kept = find_task(run, "/gone/task_of_mine.py:Mine", None)
    assert kept.kept is None, "it lies where it lay"
    (tmp_path / "task_of_mine.py").unlink()
    assert loaded(find_task(run, "/gone/task_of_mine.py:Mine")).rate == 0.5, "that of the run"
    assert sys.modules["nets_of_mine"] is nets_of_mine


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "in place"])
def test_code_that_is_not_what_the_run_began_with_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_kept: bool
) -> None:
    run = project(tmp_path)
    kept = read_source(run.path)
    assert kept is not None
    recorded = {"task source": kept.source.digest, "python": platform.python_version()}
    reference = f"{tmp_path}/task_of_mine.py:Mine"
    if is_kept:
        (tmp_path / "task_of_mine.py").unlink()
    folder = run.path / "source" if is_kept else tmp_path
    warn_of_other_code(run, recorded, find_task(run, reference))
    (folder / "nets_of_mine.py").write_text("RATE = 0.1  # a comment\n")
    warn_of_other_code(run, recorded, find_task(run, reference))
    assert "began with" not in caplog.text
    (folder / "nets_of_mine.py").write_text("RATE = 0.7\n")
    warn_of_other_code(run, recorded, find_task(run, reference))
    assert "is not what run mine-0001 began with" in caplog.text
