"""Embeddings that were built with sparse=True give the same digest on any number of workers and servers."""

from pathlib import Path
from typing import Any

import pytest

import quorate
from bits import sparse_tasks as tasks
from bits.shapes import Shape, one_digest, trained

pytestmark = pytest.mark.usefixtures("unmeasured")

CASES: list[tuple[type[quorate.Task], dict[str, Any]]] = [
    (tasks.Embeddings, {}),
    (tasks.Embeddings, {"clip_norm": 0.05, "accumulate": 2, "batch_size": 16}),
    (tasks.Embeddings, {"lanes": 1, "average": {"decay": 0.9}}),
    (tasks.PerWord, {"clip_norm": 1.0}),
    (tasks.Rates, {}),
    (tasks.TwoKinds, {"schedule": {"kind": "cosine"}}),
]
QUICK = (1, 3, 5)
"""Cases, by their places, that have most in them: clipped, each word by itself, and of two kinds."""
IDS = [f"{task.__name__}{''.join(f'-{key}' for key in keys)}" for task, keys in CASES]
NUMBERED = list(enumerate(zip(CASES, IDS, strict=True)))


@pytest.mark.parametrize(
    ("task", "keys"),
    [pytest.param(*case, id=name, marks=() if at in QUICK else pytest.mark.long) for at, (case, name) in NUMBERED],
)
def test_the_digest_depends_on_lanes_alone(task: type[quorate.Task], keys: dict[str, Any], tmp_path: Path) -> None:
    workers = min(3, keys.get("lanes", 4))
    shapes = Shape(1, 1), Shape(workers, 2, 2), Shape(min(2, workers), 3, links="tcp")
    one_digest(task, tmp_path, *shapes, **keys)


def test_over_other_links_the_digest_is_the_same(tmp_path: Path) -> None:
    one_digest(tasks.TwoKinds, tmp_path, Shape(1, 1), *(Shape(2, 2, 2, hosts=hosts) for hosts in ("AABB", "ABAB")))


@pytest.mark.parametrize("task", [tasks.Embeddings, tasks.OnlyTables])
def test_it_is_close_to_what_dense_gradients_give(task: type[quorate.Task], tmp_path: Path) -> None:
    """Not to the bit: rows that a lane does not have are not added as zeros, and lanes are added in another order."""
    sparse = trained(task, tmp_path / "sparse", Shape(2, 1))
    dense = trained(task, tmp_path / "dense", Shape(2, 1), params={"sparse": False})
    assert sparse.losses == pytest.approx(dense.losses, rel=1e-4)
    assert sparse.losses[-1] != sparse.losses[0]


@pytest.mark.parametrize("keys", [{}, pytest.param({"clip_norm": 0.05}, marks=pytest.mark.long)], ids=str)
def test_no_parameter_needs_to_be_dense(keys: dict[str, Any], tmp_path: Path) -> None:
    shapes = Shape(1, 1), Shape(3, 2, 2), Shape(2, 3, links="tcp"), Shape(2, 2, 2, hosts="ABAB")
    one_digest(tasks.OnlyTables, tmp_path, *shapes, **keys)


@pytest.mark.parametrize("task", [pytest.param(tasks.Rates, marks=pytest.mark.long), tasks.TwoKinds, tasks.OnlyMoments])
def test_a_job_goes_on_from_a_checkpoint_on_other_servers(task: type[quorate.Task], tmp_path: Path) -> None:
    whole = trained(task, tmp_path / "whole", Shape(1, 1))
    first = trained(task, tmp_path / "parts", Shape(2, 2), stop_at=3)
    assert first.ending == "interrupted"
    assert trained(task, tmp_path / "parts", Shape(3, 1)).digest == whole.digest


def test_an_optimizer_that_changes_other_rows_is_refused(tmp_path: Path) -> None:
    failure = trained(tasks.Momentum, tmp_path / "run", Shape(1, 1)).failure
    assert "'words.weight' has sparse gradients" in failure.message
    assert "momentum of SGD" in failure.message


@pytest.mark.parametrize(
    ("strategy", "by"),
    [
        ({"kind": "parameter-server", "mode": "asynchronous"}, "mode: asynchronous"),
        ({"kind": "ddp"}, "strategy: ddp"),
        ({"kind": "fsdp", "shard": 2}, "strategy: fsdp"),
    ],
    ids=str,
)
def test_what_has_no_rows_refuses_them_by_name(strategy: dict[str, Any], by: str, tmp_path: Path) -> None:
    failure = trained(tasks.OnlyTables, tmp_path, Shape(2), strategy=strategy, workers=2).failure
    assert f"'weight' has sparse gradients (sparse=True), which `{by}` does not take" in failure.message
    assert "`strategy: parameter-server` with `mode: synchronous`" in failure.message


def test_the_ring_names_servers_as_the_remedy(tmp_path: Path) -> None:
    failure = trained(tasks.Embeddings, tmp_path, Shape(2)).failure
    assert "'words.weight'" in failure.message or "'bags.weight'" in failure.message
    assert "strategy: parameter-server" in failure.message
