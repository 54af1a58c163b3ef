"""Embeddings that were built with sparse=True give the same digest on any number of workers and servers."""

from pathlib import Path
from typing import Any

import pytest

import gang
import quorate
from bits import sparse_tasks as tasks

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


def trained(task: type[quorate.Task], folder: Path, shape: tuple[int, int, int], **keys: Any) -> gang.Ended:
    folder.mkdir(exist_ok=True)
    workers, servers, replicas = shape
    hosts, stop_at = keys.pop("hosts", ""), keys.pop("stop_at", None)
    strategy = {"kind": "parameter-server", "servers": servers, "replicas": replicas}
    spec = gang.job(task, strategy=strategy, **keys)
    return gang.train(task, spec, min(workers, spec.lanes), folder, hosts=hosts, stop_at=stop_at)


@pytest.mark.parametrize(
    ("task", "keys"),
    [pytest.param(*case, id=name, marks=() if at in QUICK else pytest.mark.long) for at, (case, name) in NUMBERED],
)
def test_the_digest_depends_on_lanes_alone(task: type[quorate.Task], keys: dict[str, Any], tmp_path: Path) -> None:
    shapes = {(1, 1, 1): "auto", (3, 2, 2): "auto", (2, 3, 1): "tcp"}
    found = {
        str(shape): trained(task, tmp_path / str(shape), shape, links=links, **keys).digest
        for shape, links in shapes.items()
    }
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("hosts", ["AABB", "ABAB"])
def test_over_other_links_the_digest_is_the_same(hosts: str, tmp_path: Path) -> None:
    one = trained(tasks.TwoKinds, tmp_path / "one", (1, 1, 1))
    assert trained(tasks.TwoKinds, tmp_path / "hosts", (2, 2, 2), hosts=hosts).digest == one.digest


@pytest.mark.parametrize("task", [tasks.Embeddings, tasks.OnlyTables])
def test_it_is_close_to_what_dense_gradients_give(task: type[quorate.Task], tmp_path: Path) -> None:
    """Not to the bit: rows that a lane does not have are not added as zeros, and lanes are added in another order."""
    sparse = trained(task, tmp_path / "sparse", (2, 1, 1))
    dense = trained(task, tmp_path / "dense", (2, 1, 1), params={"sparse": False})
    assert sparse.losses == pytest.approx(dense.losses, rel=1e-4)
    assert sparse.losses[-1] != sparse.losses[0]


@pytest.mark.parametrize("keys", [{}, pytest.param({"clip_norm": 0.05}, marks=pytest.mark.long)], ids=str)
def test_no_parameter_needs_to_be_dense(keys: dict[str, Any], tmp_path: Path) -> None:
    one = trained(tasks.OnlyTables, tmp_path / "one", (1, 1, 1), **keys)
    shapes: dict[str, tuple[int, int, int]] = {"auto": (3, 2, 2), "tcp": (2, 3, 1)}
    for links, shape in shapes.items():
        assert trained(tasks.OnlyTables, tmp_path / links, shape, links=links, **keys).digest == one.digest
    assert trained(tasks.OnlyTables, tmp_path / "hosts", (2, 2, 2), hosts="ABAB", **keys).digest == one.digest


@pytest.mark.parametrize("task", [pytest.param(tasks.Rates, marks=pytest.mark.long), tasks.TwoKinds, tasks.OnlyMoments])
def test_a_job_goes_on_from_a_checkpoint_on_other_servers(task: type[quorate.Task], tmp_path: Path) -> None:
    whole = trained(task, tmp_path / "whole", (1, 1, 1))
    first = trained(task, tmp_path / "parts", (2, 2, 1), stop_at=3)
    assert first.ending == "interrupted"
    assert trained(task, tmp_path / "parts", (3, 1, 1)).digest == whole.digest


def test_an_optimizer_that_changes_other_rows_is_refused(tmp_path: Path) -> None:
    failure = trained(tasks.Momentum, tmp_path / "run", (1, 1, 1)).failure
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
    spec = gang.job(tasks.OnlyTables, strategy=strategy, workers=2)
    failure = gang.train(tasks.OnlyTables, spec, 2, tmp_path).failure
    assert f"'weight' has sparse gradients (sparse=True), which `{by}` does not take" in failure.message
    assert "`strategy: parameter-server` with `mode: synchronous`" in failure.message


def test_the_ring_names_servers_as_the_remedy(tmp_path: Path) -> None:
    failure = gang.train(tasks.Embeddings, gang.job(tasks.Embeddings), 2, tmp_path).failure
    assert "'words.weight'" in failure.message or "'bags.weight'" in failure.message
    assert "strategy: parameter-server" in failure.message
