from typing import Any

import pytest
from pydantic import ValidationError

from quorate.core.errors import JobFileError
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.keys import Mark
from quorate.spec.rules import checked_job, doubtful_modes

MINIMAL: dict[str, Any] = {"task": "package.module:Task", "batch_size": 64, "epochs": 1}


def job(**changed: Any) -> JobSpec:
    return checked_job({**MINIMAL, **changed})


def test_every_key_is_marked() -> None:
    marks = {key: mark_of(key) for key in JobSpec.model_fields}
    assert {key for key, mark in marks.items() if mark is Mark.LABEL} == {"version", "name"}


MANNER = """
    audit balance callbacks capture check_gradients checkpoint encrypt engine failure_timeout links loader_prefetch
    loader_workers log_level min_workers notify overlap port record reuse runs setup_timeout share spares step_timeout
    track train_metrics_every workers
"""


def test_keys_that_change_only_how_a_job_runs() -> None:
    manner = {key for key in JobSpec.model_fields if mark_of(key) is Mark.MANNER}
    assert sorted(manner - {"nccl"}) == MANNER.split()  # an option adds that one


def test_lanes_do_not_follow_workers() -> None:
    assert job(workers=3).lanes == job(workers=1).lanes == 8


@pytest.mark.parametrize(
    ("changed", "cores", "count"),
    [
        ({}, 4, 4),
        ({}, 64, 8),
        ({"threads": 2}, 8, 4),
        ({"threads": 16}, 8, 1),
        ({"workers": 5}, 2, 5),
        ({"lanes": 1}, 0, 1),
    ],
)
def test_auto_is_as_many_workers_as_lanes_and_cores_allow(changed: dict[str, Any], cores: int, count: int) -> None:
    assert job(**changed).worker_count(cores) == count


REFUSED: dict[str, list[Any]] = {
    "version": [True, 2.0, 3],
    "lanes": ["8", 8.0, True, 0],
    "seed": [-1, 2**63],
    "workers": [True, 2.5, "all"],
    "deterministic": [1, "true"],
    "overlap": [1, "off"],
    "min_workers": [0, 1.0, "auto"],
    "step_timeout": [0, "off"],
    "setup_timeout": [0],
    "balance": ["fast", None],
    "failure_timeout": [0, True, "5", float("inf")],
    "clip_norm": [float("nan"), 0],
    "bucket_mb": [-1.0],
    "on_nonfinite_loss": ["ignore"],
    "precision": ["fp8"],
    "on_bad_sample": ["ignore", True],
    "loader_prefetch": [0],
    "name": ["-dash", "", "a/b", "a\n", 7],
    "task": ["no_class"],
    "port": [65536],
    "runs": [""],
    "params": [None, [1], {1: 2}],
    "checkpoint": [None],
    "checkpoint.every": [0],
    "checkpoint.keep": [0],
    "checkpoint.keeps": [1],
    "checkpoint.keep_every": [0],
    "checkpoint.minutes": [-1, "5"],
    "checkpoint.to": ["checkpoints", None, ["checkpoints", 3]],
    "checkpoint.when_busy": ["queue"],
    "checkpoint.digest": ["md5"],
    "checkpoint.encrypt": ["secret"],
    "checkpoint.encrypt.key": ["secret"],
    "checkpoint.encrypt.key_file": [""],
    "checkpoint.encrypt.key_env": ["not a name", "QUORATE_KEY", "ab" * 32],
    "evaluate.every": ["never", 0],
    "evaluate.metric": [""],
    "schedule": [{"kind": "cosine", "final": 1.5}],
    "early_stop": [{"metric": "loss"}, {"metric": "loss", "patience": 0}],
    "strategy": ["rings"],
    "unknown": [1],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_refused(key: str, value: Any) -> None:
    changed = value
    for name in reversed(key.split(".")):
        changed = {name: changed}
    with pytest.raises(ValidationError):
        job(**changed)


@pytest.mark.parametrize("initial", [1000, 0])
def test_a_scale_of_the_loss_that_is_no_power_of_two_is_refused(initial: int) -> None:
    with pytest.raises(ValidationError):
        job(precision="fp16", loss_scale={"initial": initial})


@pytest.mark.parametrize("given", [{}, {"warmup": 2}, {"per": "epoch", "final": 0.1}, {"kind": None}], ids=str)
def test_a_schedule_without_a_kind_only_says_how_often_the_tasks_own_steps(given: dict[str, Any]) -> None:
    with pytest.raises(JobFileError, match=r"schedule\.kind: schedule has no kind"):
        job(schedule=given)
    assert job(schedule={"per": "epoch"}).schedule is not None


def test_a_whole_number_is_a_number() -> None:
    timeout = job(failure_timeout=3).failure_timeout
    assert (timeout, type(timeout)) == (3.0, float)


def test_a_scalar_strategy_is_its_kind() -> None:
    assert job(strategy="ring") == job(strategy={"kind": "ring"}) == job()


def test_it_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        job().lanes = 4


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"workers": 9}, "workers"),
        ({"batch_size": 7}, "batch_size"),
        ({"batch_size": 15, "accumulate": 2}, "batch_size"),
        ({"epochs": None}, "epochs"),
        ({"steps": 5}, "epochs"),
    ],
)
def test_rules_between_keys_hold_for_every_job(changed: dict[str, Any], path: str) -> None:
    with pytest.raises(JobFileError) as caught:
        job(**changed)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize("changed", [{"workers": 8}, {"batch_size": 8}, {"batch_size": 16, "accumulate": 2}])
def test_rules_hold_at_their_edge(changed: dict[str, Any]) -> None:
    assert job(**changed)


def test_auto_starts_as_many_workers_as_training_waits_for() -> None:
    assert job(min_workers=3).worker_count(1) == 3


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"workers": 2, "min_workers": 3}, "it waits for 3 workers and can have 2 (workers), and 3 > 2"),
        ({"lanes": 4, "min_workers": 5}, "it waits for 5 workers and can have 4 (lanes), and 5 > 4"),
    ],
)
def test_a_job_waits_for_no_more_workers_than_it_can_have(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(JobFileError) as refused:
        job(**changed)
    assert told in refused.value.message


# --- checkpoints


@pytest.mark.parametrize(
    ("given", "minutes"),
    [
        ({}, 10),
        ({"minutes": None}, 10),
        ({"every": 5}, None),
        ({"every": "epoch"}, None),
        ({"every": "epoch", "minutes": 30}, 30),
        ({"minutes": 0.5}, 0.5),
        ({"minutes": 0}, None),
        ({"every": 5, "minutes": 0}, None),
    ],
)
def test_a_job_that_does_not_say_when_saves_every_ten_minutes(given: dict[str, Any], minutes: float | None) -> None:
    assert job(checkpoint=given).checkpoint.minutes_between == minutes


def test_what_is_left_away_keeps_three_in_the_run() -> None:
    assert job(checkpoint={}).checkpoint == job().checkpoint
    assert job().checkpoint.model_dump() == {
        "every": None,
        "minutes": None,
        "keep": 3,
        "keep_every": None,
        "to": ["checkpoints"],
        "source": True,
        "when_busy": "wait",
        "digest": "xxh3-128",
        "encrypt": None,
    }


@pytest.mark.parametrize(
    "checkpoint",
    [
        {"to": ["checkpoints", "/mnt/backup", "s3://bucket/prefix", "file:///mnt/other", "sftp://me@host/folder"]},
        {"encrypt": {"key_file": "/secret/key"}},
        {"encrypt": {"key_env": "MY_KEY", "key_file": None}},
        {"every": 5, "minutes": 0.5, "keep_every": 100},
    ],
)
def test_ways_to_keep_checkpoints(checkpoint: dict[str, Any]) -> None:
    spec = job(checkpoint=checkpoint)
    assert JobSpec.model_validate(spec.model_dump()) == spec


@pytest.mark.parametrize(
    ("checkpoint", "path", "told"),
    [
        ({"to": []}, "checkpoint.to", "it names no place: a checkpoint is saved in the run's own folder"),
        ({"to": ["/mnt/backup"]}, "checkpoint.to", 'it begins with "/mnt/backup": a checkpoint is saved in the run'),
        ({"to": ["checkpoints", "backup"]}, "checkpoint.to", '"backup" is neither the absolute path of a folder nor'),
        ({"to": ["checkpoints", "s3:/bucket"]}, "checkpoint.to", '"s3:/bucket" is neither the absolute path'),
        ({"to": ["checkpoints", ""]}, "checkpoint.to", '"" is neither the absolute path'),
        ({"to": ["checkpoints", "checkpoints"]}, "checkpoint.to", '"checkpoints" stands there twice'),
        ({"to": ["checkpoints", "/a/", "/a"]}, "checkpoint.to", '"/a" stands there twice'),
        ({"to": ["checkpoints", "ftp://me:word@host/a"]}, "checkpoint.to", '"ftp://…@host/a" has a password or'),
        ({"to": ["checkpoints", "ftp://me:wo@rd@host/a"]}, "checkpoint.to", '"ftp://…@host/a" has a password or'),
        ({"to": ["checkpoints", "ftp://me:wo/rd@host/a"]}, "checkpoint.to", '"ftp://…@host/a" has a password or'),
        ({"to": ["checkpoints", "s3://b/a folder?k=word"]}, "checkpoint.to", '"s3://b/a folder?…" has a password or'),
        ({"encrypt": {}}, "checkpoint.encrypt", "neither key_file nor key_env is given"),
        ({"encrypt": {"key_file": "/k", "key_env": "K"}}, "checkpoint.encrypt", "both key_file and key_env are given"),
    ],
)
def test_rules_of_checkpoints(checkpoint: dict[str, Any], path: str, told: str) -> None:
    with pytest.raises(JobFileError) as refused:
        job(checkpoint=checkpoint)
    (problem,) = refused.value.problems
    assert problem.path == path
    assert told in problem.text
    assert problem.hint
    assert ":word" not in refused.value.message


@pytest.mark.parametrize(
    ("watched", "told"),
    [
        ({"metric": "val_accuracy"}, "a smaller val_accuracy counts as better (mode: min)"),
        ({"metric": "accuracy", "mode": "max"}, ""),
        ({"metric": "loss", "mode": "max"}, "a larger loss counts as better (mode: max)"),
        ({"metric": "loss"}, ""),
        ({"metric": "wetness"}, ""),
    ],
    ids=str,
)
def test_a_mode_that_the_name_of_its_metric_contradicts_is_in_doubt(watched: dict[str, Any], told: str) -> None:
    (doubt,) = list(doubtful_modes(job(evaluate=watched))) or [""]
    assert told in doubt and bool(told) is bool(doubt)
    assert len(list(doubtful_modes(job(early_stop={"patience": 1, **watched})))) == bool(told)
