"""The folder of runs that a job file names, or not."""

from pathlib import Path
from typing import Any

import pytest

from quorate.core.errors import JobFileError, RequestError
from quorate.spec.load import load_job, load_recorded, resolve_mapping
from quorate.spec.override import Override, parse_set
from quorate.spec.resolved import ResolvedJob

JOB = """\
task: digits.py:Digits
batch_size: 64
epochs: 3
params:
  rate: 0.1
  layers: [8, 8]
checkpoint: {every: 200}
strategy: ring
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").touch()
    path = tmp_path / "digits.yaml"
    path.write_text(JOB)
    return path


def load(path: Path, *settings: str, **environment: str) -> ResolvedJob:
    return load_job(path, environment, [parse_set(setting) for setting in settings])


def test_the_file_alone(job_file: Path) -> None:
    resolved = load(job_file)
    assert resolved.source == str(job_file)
    assert resolved.spec.task == f"{job_file.parent.resolve()}/digits.py:Digits"
    assert (resolved.spec.name, resolved.spec.epochs, resolved.spec.checkpoint.every) == ("digits", 3, 200)


def test_the_command_line_beats_the_environment_and_that_the_file(job_file: Path) -> None:
    environment = {"QUORATE_BATCH_SIZE": "128", "QUORATE_CHECKPOINT__EVERY": "50"}
    resolved = load(job_file, "checkpoint.every=7", **environment)
    assert (resolved.spec.batch_size, resolved.spec.checkpoint.every, resolved.spec.params["rate"]) == (128, 7, 0.1)


def test_every_value_has_an_origin(job_file: Path) -> None:
    origins = load(job_file, "params.rate=0.2", "checkpoint.keep=1", QUORATE_SEED="4").origins
    assert origins["batch_size"] == "digits.yaml line 2"
    assert origins["params.rate"] == "--set params.rate"
    assert origins["params.layers"] == "digits.yaml line 6"
    assert origins["checkpoint.every"] == "digits.yaml line 7"
    assert origins["checkpoint.keep"] == "--set checkpoint.keep"
    assert origins["strategy.kind"] == "digits.yaml line 8"
    assert origins["seed"] == "environment QUORATE_SEED"
    assert origins["evaluate.every"] == origins["schedule"] == origins["name"] == "default"
    assert "params" not in origins and "checkpoint" not in origins


def test_a_whole_mapping_set_is_the_origin_of_what_is_in_it(job_file: Path) -> None:
    resolved = load(job_file, "params={rate: 0.5}", "checkpoint={keep: 2}")
    assert resolved.spec.params == {"rate": 0.5}
    assert resolved.spec.checkpoint.every is None
    assert resolved.origins["params.rate"] == "--set params"
    assert resolved.origins["checkpoint.keep"] == "--set checkpoint"
    assert resolved.origins["checkpoint.every"] == "default"


def test_the_key_of_a_later_layer_replaces_that_of_the_file(job_file: Path) -> None:
    """One names a file, and one a variable: whoever names either means no other."""
    job_file.write_text(JOB.replace("{every: 200}", "{encrypt: {key_file: /key}}"))

    def key(*sets: str, **variables: str) -> dict[str, str | None]:
        encrypt = load(job_file, *sets, **variables).spec.checkpoint.sealing
        assert encrypt is not None
        return dict(encrypt)

    assert key() == {"key_file": "/key", "key_env": None}
    assert key("checkpoint.encrypt.key_env=MINE") == {"key_file": None, "key_env": "MINE"}
    assert key(QUORATE_CHECKPOINT__ENCRYPT__KEY_ENV="MINE") == {"key_file": None, "key_env": "MINE"}
    over = key("checkpoint.encrypt.key_file=/other", QUORATE_CHECKPOINT__ENCRYPT__KEY_ENV="MINE")
    assert over == {"key_file": "/other", "key_env": None}
    with pytest.raises(JobFileError, match="both key_file and key_env are given"):
        key("checkpoint.encrypt.key_file=/other", "checkpoint.encrypt.key_env=MINE")


def test_steps_of_a_later_layer_replace_epochs_and_the_reverse(job_file: Path) -> None:
    resolved = load(job_file, QUORATE_STEPS="9")
    assert (resolved.spec.epochs, resolved.spec.steps) == (None, 9)
    assert resolved.origins["epochs"] == "default"
    resolved = load(job_file, "epochs=2", QUORATE_STEPS="9")
    assert (resolved.spec.epochs, resolved.spec.steps) == (2, None)


def test_two_lengths_in_one_layer_are_a_mistake(job_file: Path) -> None:
    with pytest.raises(JobFileError, match=r"both epochs: 2 \(--set epochs\) and steps: 5"):
        load(job_file, "epochs=2", "steps=5")


def test_an_inner_key_replaces_a_scalar_strategy_and_a_null_section(job_file: Path) -> None:
    job_file.write_text(JOB + "early_stop: null\n")
    resolved = load(job_file, "strategy.kind=ring", "early_stop.metric=loss", "early_stop.patience=2")
    assert resolved.spec.early_stop is not None
    assert resolved.spec.early_stop.patience == 2
    assert resolved.origins["strategy.kind"] == "--set strategy.kind"


def test_later_overrides_of_one_layer_win(job_file: Path) -> None:
    resolved = load_job(job_file, {}, [Override("workers", 2, "--workers"), parse_set("workers=3")])
    assert (resolved.spec.workers, resolved.origins["workers"]) == (3, "--set workers")


@pytest.mark.parametrize(
    ("stem", "name"), [("my job", "my-job"), ("_x", "x"), ("...", "job"), ("a" * 120, "a" * 100), ("día", "d-a")]
)
def test_a_name_is_made_from_any_file_name(job_file: Path, stem: str, name: str) -> None:
    assert load(job_file.rename(job_file.with_name(f"{stem}.yaml"))).spec.name == name


def test_a_byte_order_mark_is_no_part_of_the_first_key(job_file: Path) -> None:
    job_file.write_bytes(b"\xef\xbb\xbf" + JOB.encode())
    assert load(job_file).spec.batch_size == 64


def test_a_missing_file_names_its_neighbours(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job_file.parent / ".hidden.yaml").touch()
    with pytest.raises(RequestError, match=r"no job file .*digit\.yaml\. Did you mean .*/digits\.yaml\?") as caught:
        load(job_file.with_name("digit.yaml"))
    assert not isinstance(caught.value, JobFileError)
    with pytest.raises(RequestError, match=r"no job file .*train\.yaml\. The folder .* holds digits\.yaml\."):
        load(job_file.with_name("train.yaml"))
    monkeypatch.chdir(job_file.parent)
    with pytest.raises(RequestError, match=r"no job file train\.yaml\. This folder holds digits\.yaml\."):
        load(Path("train.yaml"))
    with pytest.raises(RequestError, match=r"no folder .*nowhere either"):
        load(job_file.parent / "nowhere" / "job.yaml")


def test_a_path_that_cannot_be_read(job_file: Path) -> None:
    with pytest.raises(RequestError, match=r"no job file .*/digits\.yaml/job\.yaml: a part of that path is a file"):
        load(job_file / "job.yaml")


def test_a_folder_without_job_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no job file .*job\.yaml\. The folder .* holds no \*\.yaml file"):
        load(tmp_path / "job.yaml")


def test_a_folder_is_not_a_job_file(job_file: Path) -> None:
    with pytest.raises(RequestError, match=r"is a folder, not a job file\. .* holds digits\.yaml"):
        load(job_file.parent)


def test_a_mapping_is_a_job_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    params: dict[str, Any] = {"betas": (0.9, 0.99), "layers": [1]}
    mapping = {"task": "not_there.py:Task", "batch_size": 8, "steps": 1, "params": params, "checkpoint": {"keep": 1}}
    resolved = resolve_mapping(mapping, "Job(…)", {"QUORATE_WORKERS": "2"}, [])
    params["layers"].append(2)
    assert resolved.spec.task == f"{tmp_path.resolve()}/not_there.py:Task"
    assert resolved.spec.params == {"betas": [0.9, 0.99], "layers": [1]}
    assert resolved.spec.name == "job"
    assert resolved.origins["params.betas"] == resolved.origins["checkpoint.keep"] == resolved.source == "Job(…)"
    assert (resolved.origins["workers"], resolved.origins["checkpoint.every"]) == (
        "environment QUORATE_WORKERS",
        "default",
    )


class Half(float):
    """Stands for a NumPy number: it passes for a float and is none."""


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"params": {"rate": Half(0.5)}}, "params.rate"),
        ({"params": {"deep": [{"function": print}]}}, "params.deep[0].function"),
        ({"params": {"deep": [float("nan")]}}, "params.deep[0]"),
        ({"clip_norm": Half(0.5)}, "clip_norm"),
        ({"clip_norm": float("inf")}, "clip_norm"),
        ({"params": {"deep": {3: 4}}}, "params.deep"),
    ],
)
def test_values_that_no_file_could_hold(changed: dict[str, Any], path: str) -> None:
    with pytest.raises(JobFileError) as caught:
        resolve_mapping({"task": "a.b:C", "batch_size": 8, "steps": 1, **changed}, "Job(…)", {}, [])
    assert [problem.path for problem in caught.value.problems] == [path]


def test_a_recorded_job_may_outlive_its_task(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("task: /gone/task.py:Task\nbatch_size: 8\nsteps: 1\n")
    resolved = load_recorded(path, {}, [parse_set("epochs=2")])
    assert resolved.spec.task == "/gone/task.py:Task"
    assert (resolved.origins["task"], resolved.origins["epochs"], resolved.origins["steps"]) == (
        "recorded",
        "--set epochs",
        "default",
    )


def test_the_file_of_a_key_is_relative_to_the_job_file(job_file: Path) -> None:
    resolved = load(job_file, "checkpoint.encrypt.key_file=keys/mine")
    assert dict(resolved.spec.checkpoint.sealing or {})["key_file"] == str(job_file.parent.absolute() / "keys/mine")
    assert resolved.origins["checkpoint.encrypt.key_file"] == "--set checkpoint.encrypt.key_file"
    assert resolved.spec.checkpoint.every == 200


def test_a_script_with_a_training_loop_in_place_of_a_job_file(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import quorate\n\n\ndef main(run, rate: float = 0.1):\n    ...\n")
    with pytest.raises(RequestError, match=r"`task: script\.py:main`.*call quorate\.launch\(\) there"):
        load_job(file, {}, [])


PLAIN = "task: package.module:Task\nbatch_size: 8\nsteps: 1\n"


@pytest.mark.parametrize(
    ("said", "here", "folder"),
    [
        ("", "project", "runs"),
        ("", "elsewhere", "{root}/project/mine/runs"),
        ("runs: out\n", "project", "{root}/project/mine/out"),
        ("runs: out\n", "project/mine", "out"),
        ("runs: runs\n", "project", "{root}/project/mine/runs"),
        ("runs: /data/runs\n", "project", "/data/runs"),
    ],
)
def test_it_is_relative_to_the_job_file(
    said: str, here: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("project/mine", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    file = tmp_path / "project" / "mine" / "job.yaml"
    file.write_text(PLAIN + said)
    monkeypatch.chdir(tmp_path / here)
    job = load_job(file, {}, [])
    assert job.spec.runs == folder.format(root=tmp_path)
    assert job.origins["runs"] == ("job.yaml line 4" if said else "default")
    assert load_job(file, {"QUORATE_RUNS": "mine"}, []).spec.runs == "mine", "to the working folder where it is typed"
    assert load_job(file, {}, [Override("runs", "typed", "--runs")]).spec.runs == "typed"


@pytest.mark.parametrize(
    ("start", "folder"),
    [("project", "runs"), ("project/runs/mine-0001", "{root}/project/runs"), ("", "{root}/project/runs")],
)
def test_a_recorded_job_is_trained_again_beside_its_run(
    start: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "project/runs/mine-0001"
    run.mkdir(parents=True)
    (run / "created").touch()
    (run / "job.yaml").write_text(f"{PLAIN}runs: runs\n")
    monkeypatch.delenv("QUORATE_RUNS", raising=False)
    monkeypatch.chdir(tmp_path / start)
    assert load_job(run / "job.yaml", {}, []).spec.runs == folder.format(root=tmp_path)
