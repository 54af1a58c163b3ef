"""What nodes are given of a job's code, and where it is found there."""

import shutil
from pathlib import Path

import pytest

import quorate
from quorate.core.errors import RequestError
from quorate.core.failure import Failure
from quorate.engines.engine import Preparation
from quorate.engines.ray.node_code import NodeCode, code_of, moved, node_code, with_remedy, without_installed
from quorate.engines.ray.option import RuntimeEnvSpec
from quorate.spec.load import resolve_mapping
from quorate.storage.task_files import files_of

QUORATE = str(Path(quorate.__file__).parent)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "task.py").write_text("")
    return folder


def preparation(task: str, *search_path: str) -> Preparation:
    return Preparation(task, {}, "job.yaml", list(search_path), 0, 1, True)


def test_the_folder_of_the_task_and_quorate_travel(project: Path) -> None:
    code = code_of(f"{project}/task.py:Task", RuntimeEnvSpec(), [])
    assert code.root == project
    assert code.runtime_env("code.zip")["working_dir"] == "code.zip"
    assert code.runtime_env("code.zip")["py_modules"] == [QUORATE]


def test_runs_storage_and_job_file_stay_where_they_are_below_the_folder(project: Path, tmp_path: Path) -> None:
    stays = [project / "runs", project / "jobs" / "job.yaml", tmp_path / "elsewhere"]
    code = code_of(f"{project}/task.py:Task", RuntimeEnvSpec(excludes=["data/"]), stays)
    assert {"data/", "/runs", "/jobs/job.yaml", ".venv", ".git", ".env", ".env.*"} <= set(code.excludes)
    assert not any("elsewhere" in exclude for exclude in code.excludes)


def test_other_job_files_stay_as_well_and_other_yaml_travels(project: Path) -> None:
    """Each may have a password in it."""
    (project / "jobs").mkdir()
    for name, text in {
        "a.yaml": "version: 2\ntask: task.py:A\n",
        "jobs/b.yml": '"task": x\n',
        "c.yaml": "a: 1\n",
    }.items():
        (project / name).write_text(text)
    (project / "data").mkdir()
    (project / "data" / "d.yaml").write_text("task: x\n")
    code = code_of(f"{project}/task.py:Task", RuntimeEnvSpec(excludes=["data/"]), [])
    assert {"/a.yaml", "/jobs/b.yml"} <= set(code.excludes)
    assert not {"/c.yaml", "/data/d.yaml"} & set(code.excludes), "what stays as a whole is not looked into"


@pytest.mark.parametrize("said", ["", " with --set params.width"])
def test_the_job_file_stays_whatever_its_path_has_in_it(said: str, tmp_path: Path) -> None:
    folder = tmp_path / "jobs with data"
    folder.mkdir()
    for name in ("task.py", "job.yaml"):
        (folder / name).write_text("")
    keys = {"task": f"{folder}/task.py:Task", "batch_size": 8, "steps": 1, "engine": "ray"}
    spec = resolve_mapping(keys, "a test", {}, []).spec
    code = node_code(spec, spec.task, tmp_path / "runs", f"{folder}/job.yaml{said}")
    assert "/job.yaml" in code.excludes


def test_what_the_job_excludes_is_not_said_to_ray_which_would_exclude_it_from_modules(project: Path) -> None:
    code = code_of(f"{project}/task.py:Task", RuntimeEnvSpec(excludes=["data/"]), [])
    assert code.runtime_env("code.zip")["excludes"] == ["__pycache__"]


def test_what_the_job_asks_for_comes_along(project: Path) -> None:
    asked = RuntimeEnvSpec(pip=["einops"], py_modules=["/lib/mine"], env_vars={"A": "1"})
    given = code_of(f"{project}/task.py:Task", asked, []).runtime_env(None)
    assert given["pip"] == ["einops"] and given["env_vars"] == {"A": "1"}
    assert given["py_modules"] == [QUORATE, "/lib/mine"]
    assert "working_dir" not in given


def test_a_module_travels_from_where_it_is_imported(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "mine").mkdir()
    (project / "mine" / "__init__.py").write_text("")
    (project / "mine" / "task.py").write_text("")
    monkeypatch.syspath_prepend(project)
    assert code_of("mine.task:Task", RuntimeEnvSpec(), []).root == project
    assert code_of("torch.nn:Module", RuntimeEnvSpec(), []).root is None


def test_a_working_dir_has_to_hold_the_task(project: Path, tmp_path: Path) -> None:
    assert code_of(f"{project}/task.py:Task", RuntimeEnvSpec(working_dir=str(tmp_path)), []).root == tmp_path
    (tmp_path / "other").mkdir()
    with pytest.raises(RequestError, match=r"is not below .*other"):
        code_of(f"{project}/task.py:Task", RuntimeEnvSpec(working_dir=f"{tmp_path}/other"), [])
    with pytest.raises(RequestError, match="no folder"):
        code_of(f"{project}/task.py:Task", RuntimeEnvSpec(working_dir=f"{tmp_path}/none"), [])


def test_task_and_search_path_are_found_in_the_copy() -> None:
    there = moved(preparation("/p/a/task.py:Task", "/p", "/p/a", "/q"), Path("/p"), Path("/copy"))
    assert there.task == "/copy/a/task.py:Task"
    assert there.search_path == ["/copy", "/copy/a", "/q"]
    assert moved(preparation("a.task:Task", "/p"), Path("/p"), Path("/copy")).task == "a.task:Task"


def test_a_node_that_has_the_same_code_computes_where_it_lies(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    asked = preparation(f"{project}/task.py:Task", str(project))
    assert moved(asked, project, copy) == asked
    (copy / "helper.py").write_text("")
    assert moved(asked, project, copy).task == f"{copy}/task.py:Task", "a file is not there"
    (project / "helper.py").write_text("another = 1")
    assert moved(asked, project, copy).task == f"{copy}/task.py:Task", "it is another one there"


def test_nodes_have_packages_of_their_own() -> None:
    own = without_installed(preparation("a:Task", "/p", "/env/lib/python3.11/site-packages", "/usr/lib/python311.zip"))
    assert own.search_path == ["/p"]


@pytest.mark.parametrize(
    ("module", "line"),
    [("not_there_at_all", "pip: [not_there_at_all]"), ("yaml.nodes", "pip: [PyYAML=="), ("mine", "py_modules: [")],
)
def test_a_missing_module_is_told_with_the_line_to_add(
    module: str, line: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "mine.py").write_text("")
    monkeypatch.syspath_prepend(project)
    failure = Failure("UserCodeError", f"importing task.py: ModuleNotFoundError: No module named '{module}'.")
    told = with_remedy(failure, "10.0.0.7 (node ab12)").message
    assert f"engine: {{runtime_env: {{{line}" in told and "10.0.0.7" in told
    assert with_remedy(Failure("UserCodeError", "importing task.py: NameError"), "x").message.endswith("NameError")


def test_quorate_is_no_part_of_a_project_also_where_a_node_that_runs_a_copy_sees_the_original(
    project: Path, tmp_path: Path
) -> None:
    original = tmp_path / "checkout" / "quorate"
    original.mkdir(parents=True)
    (original / "__init__.py").write_text("")
    (project / "task.py").write_text("import mine\nimport quorate\n")
    (project / "mine.py").write_text("")
    files = files_of("task", project / "task.py", [str(project), str(original.parent)])
    assert set(files) == {"task.py", "mine.py"}


def test_nothing_travels_where_nothing_is_asked_for() -> None:
    assert NodeCode().runtime_env(None) == {}
