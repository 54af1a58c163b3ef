import os
import re
from pathlib import Path

import pytest
import yaml

from command import Workplace
from quorate.cli.app import SKELETON, name_of, skeleton, write_scaffold
from quorate.core.errors import RequestError
from quorate.spec.job import JobSpec
from quorate.spec.keys import keys_of
from quorate.spec.load import load_job
from schemas import validate

COMMENTED_KEY = re.compile(r"^# (\w+: [^#]+?)(?: +#.*)?$", re.MULTILINE)


def commented_keys() -> dict[str, object]:
    text = (SKELETON / "job.yaml").read_text().partition("\nversion:")[2]
    keys: dict[str, object] = yaml.safe_load("\n".join(COMMENTED_KEY.findall(text)))
    return keys


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


# --- the command


@pytest.mark.usefixtures("unmeasured")
def test_what_init_writes_trains_at_once_and_learns(workplace: Workplace) -> None:
    made = workplace.run("init", "my circles", "--json")
    assert made.code == 0
    validate("init", made.document)
    assert made.document["name"] == "my-circles"
    assert made.document["next"] == ["cd 'my circles'", "quorate train job.yaml"]
    workplace.task, workplace.job = (Path(file) for file in reversed(made.document["files"]))

    done = workplace.run("train", str(workplace.job), "--workers", "2", "--json")
    assert (done.code, done.document["run"]) == (0, "my-circles-0001")
    told = [event["metrics"]["accuracy"] for event in workplace.events() if event["kind"] == "evaluation"]
    assert len(told) == 10
    assert told[0] < done.document["final_metrics"]["accuracy"]
    assert done.document["final_metrics"]["accuracy"] > 0.9


def test_init_says_what_to_type_next_and_replaces_nothing_unasked(workplace: Workplace) -> None:
    first = workplace.run("init", "my")
    assert (first.code, first.stderr) == (0, "")
    indented = [line.strip() for line in first.stdout.splitlines() if line.startswith("  ")]
    assert indented == ["my/job.yaml", "my/task.py", "cd my", "quorate train job.yaml"]
    task = workplace.folder / "my" / "task.py"
    task.write_text("# my own work\n")
    again = workplace.run("init", "my", "--json")
    assert (again.code, again.document["status"]) == (2, "refused")
    assert "my/job.yaml and my/task.py are already there" in again.error
    assert "--force" in again.error
    assert task.read_text() == "# my own work\n"


# --- what is written


def test_the_job_file_is_valid_and_named_after_its_folder(tmp_path: Path) -> None:
    write_scaffold(tmp_path / "first", name=None, force=False)
    job = load_job(tmp_path / "first" / "job.yaml", {}, []).spec
    assert job.name == "first"
    assert job.task == f"{tmp_path / 'first' / 'task.py'}:MyTask"


def test_the_usual_file_is_short_and_means_the_same_as_the_full_one(tmp_path: Path) -> None:
    text = skeleton("my-job")["job.yaml"]
    assert len(text.splitlines()) <= 17
    assert yaml.safe_load(text) == yaml.safe_load(skeleton("my-job", is_full=True)["job.yaml"])
    assert "quorate init all --full" in text
    assert not commented_keys().keys() & {line.partition(":")[0].removeprefix("# ") for line in text.splitlines()}


def test_every_key_of_a_job_is_named_once() -> None:
    given = yaml.safe_load((SKELETON / "job.yaml").read_text())
    assert given.keys() & commented_keys().keys() == set()
    assert given.keys() | commented_keys().keys() == JobSpec.model_fields.keys()


@pytest.mark.parametrize("key", sorted(commented_keys()))
def test_the_defaults_that_are_told_are_true(key: str) -> None:
    given = {"task": "task.py:Task", "batch_size": 64, "epochs": 1, key: commented_keys()[key]}
    assert getattr(JobSpec.model_validate(given), key) == JobSpec.model_fields[key].default


def test_a_key_can_be_set_by_taking_its_comment_away(tmp_path: Path) -> None:
    write_scaffold(tmp_path, "new", force=False, is_full=True)
    file = tmp_path / "job.yaml"
    before = load_job(file, {}, []).spec
    text = file.read_text()
    head, _, rest = text.partition("\nversion:")
    file.write_text(f"{head}\nversion:{re.sub(r'^# (?=[a-z_]+: )', '', rest, flags=re.MULTILINE)}")
    assert file.read_text() != text
    assert load_job(file, {}, []).spec == before


def test_the_keys_in_its_examples_exist() -> None:
    text = (SKELETON / "job.yaml").read_text()
    inner = {
        f"{key}.{name}"
        for key, body in re.findall(r"^(?:# )?(\w+):.*?\{(.*?)\}", text, re.MULTILINE)
        for name in re.findall(r"(\w+):", body)
    }
    assert {"schedule.kind", "early_stop.patience", "checkpoint.keep"} <= inner
    assert {path for path in inner if not path.startswith("params.")} <= keys_of(JobSpec).keys()


def test_the_files_fit_a_terminal() -> None:
    for text in skeleton("my-job").values():
        assert max(len(line) for line in text.splitlines()) <= 120
    assert len(skeleton("x")["task.py"].splitlines()) <= 70


def test_the_skeleton_as_it_lies_there_is_what_is_written() -> None:
    assert skeleton("my-job", is_full=True) == {file.name: file.read_text() for file in SKELETON.glob("*.*")}


# --- names


@pytest.mark.parametrize(
    ("folder", "name"),
    [("circles", "circles"), ("my circles", "my-circles"), ("Größe", "Gr-e"), (".hidden", "hidden"), ("--", "job")],
)
def test_a_name_after_a_folder(tmp_path: Path, folder: str, name: str) -> None:
    assert name_of(tmp_path / folder) == name


@pytest.mark.parametrize("name", ["2024", "true", "1e3", "null", "0x1f", "a.b-c_d"])
def test_a_name_that_yaml_would_take_for_something_else_is_quoted(tmp_path: Path, name: str) -> None:
    write_scaffold(tmp_path, name, force=False)
    assert load_job(tmp_path / "job.yaml", {}, []).spec.name == name


@pytest.mark.parametrize("name", ["", "a b", "-x", "ü", "a/b", "x" * 101])
def test_a_bad_name_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=r"--name: the text .* is not a name of letters"):
        write_scaffold(tmp_path / "new", name, force=False)
    assert list(tmp_path.iterdir()) == []


# --- what is in the way


def test_force_replaces_both(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("old")
    (tmp_path / "other.py").write_text("mine")
    write_scaffold(tmp_path, "new", force=True)
    assert contents(tmp_path) == skeleton("new") | {"other.py": "mine"}


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_in_the_place_of_a_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "task.py").mkdir()
    with pytest.raises(RequestError, match=r"task\.py is "):
        write_scaffold(tmp_path, "new", force)
    assert [entry.name for entry in tmp_path.iterdir()] == ["task.py"]


def test_a_link_to_nowhere_is_in_the_way_too(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").symlink_to(tmp_path / "absent")
    with pytest.raises(RequestError, match=r"job\.yaml is already there"):
        write_scaffold(tmp_path, "new", force=False)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RequestError, match="already exists and is not a folder"):
        write_scaffold(tmp_path / "file", None, force=True)
    with pytest.raises(RequestError, match=r"cannot write into .*: Not a directory"):
        write_scaffold(tmp_path / "file" / "inner", None, force=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_second_file_that_cannot_be_written_takes_the_first_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, chunks: list[bytes]) -> int:
        if path.name == "task.py":
            raise OSError(28, "No space left on device", os.fspath(path))
        return path.write_bytes(b"".join(chunks))

    monkeypatch.setattr("quorate.storage.atomic.write_new_file", full)
    with pytest.raises(RequestError, match="No space left on device"):
        write_scaffold(tmp_path, "new", force=False)
    assert list(tmp_path.iterdir()) == []
