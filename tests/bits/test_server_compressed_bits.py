"""Compression with parameter servers: one digest on any number of workers and servers, and through a checkpoint."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits import bit_tasks as tasks
from bits.sparse_tasks import Embeddings
from bits.test_compressed_bits import BITS, COMPRESS, TASKS, TOP_K, named
from quorate.checkpoint.store import CheckpointFolder
from quorate.task.task import Task

pytestmark = pytest.mark.usefixtures("unmeasured")

SMALL: dict[str, Any] = {"bucket_mb": 0.0002}
"""Buckets so small that there are several."""
SHAPES = [(2, 2, 2), (1, 3, 2)]
"""Workers, servers and replicas that are compared."""


def at_length(values: Sequence[Any], quick: int = 1) -> list[Any]:
    """Of several cases the first few for every day, and the others for when there is time."""
    return [
        pytest.param(*([v] if isinstance(v, dict) else v), marks=pytest.mark.long if i >= quick else ())
        for i, v in enumerate(values)
    ]


def train(
    task: type[Task],
    folder: Path,
    shape: tuple[int, int, int],
    compress: dict[str, Any] | None,
    **keys: Any,
) -> gang.Ended:
    workers, servers, replicas = shape
    folder.mkdir(exist_ok=True)
    strategy = {"kind": "parameter-server", "servers": servers, "replicas": replicas, "compress": compress}
    hosts, stop_at = keys.pop("hosts", ""), keys.pop("stop_at", None)
    spec = gang.job(task, **{"strategy": strategy, **SMALL, **keys})
    return gang.train(task, spec, workers, folder, hosts=hosts, stop_at=stop_at)


def digest(task: type[Task], folder: Path, shape: tuple[int, int, int], compress: Any, **keys: Any) -> str:
    return train(task, folder, shape, compress, **keys).digest


@pytest.mark.parametrize("compress", at_length([BITS, TOP_K], quick=2), ids=named)
def test_any_number_of_workers_and_servers_gives_one_digest(compress: dict[str, Any], tmp_path: Path) -> None:
    """Over TCP as in shared memory."""
    one = digest(tasks.Momentum, tmp_path / "one", (1, 1, 1), compress)
    assert digest(tasks.Momentum, tmp_path / "many", (3, 2, 2), compress, links="tcp") == one


@pytest.mark.long
@pytest.mark.parametrize("compress", COMPRESS, ids=named)
def test_every_shape_over_every_link_gives_one_digest(compress: dict[str, Any], tmp_path: Path) -> None:
    digests = {
        f"{shape} {links}": digest(tasks.Momentum, tmp_path / f"{shape}{links}", shape, compress, links=links)
        for shape in product((1, 2, 3), (1, 2, 3), (1, 2))
        for links in ("auto", "tcp")
    }
    digests["mixed"] = digest(tasks.Momentum, tmp_path / "mixed", (2, 3, 2), compress, hosts="AABBC")
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("compress", at_length([TOP_K | {"feedback": False}, BITS | {"feedback": False}]), ids=named)
def test_without_feedback_it_is_the_digest_of_the_compressed_ring(compress: dict[str, Any], tmp_path: Path) -> None:
    """Then servers answer with values as they are: what lanes send has the same sum, whoever adds it up."""
    ring = {"strategy": {"kind": "ring", "compress": compress}}
    (tmp_path / "ring").mkdir()
    spec = gang.job(tasks.TinyTransformer, clip_norm=1.0, **SMALL, **ring)
    of_ring = gang.train(tasks.TinyTransformer, spec, 2, tmp_path / "ring").digest
    assert digest(tasks.TinyTransformer, tmp_path / "served", (3, 2, 2), compress, clip_norm=1.0) == of_ring


@pytest.mark.parametrize(("task", "keys"), at_length(TASKS[1:]), ids=named)
def test_any_task_gives_one_digest(task: type[Task], keys: dict[str, Any], tmp_path: Path) -> None:
    digests = {shape: digest(task, tmp_path / f"{shape}", shape, TOP_K, **keys) for shape in SHAPES}
    assert len(set(digests.values())) == 1, digests


def test_averages_follow_what_workers_have(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"average": {"decay": 0.9}, "checkpoint": {"every": 2}}
    digests = {shape: digest(tasks.Momentum, tmp_path / f"{shape}", shape, TOP_K, **keys) for shape in SHAPES}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.long
def test_rows_of_tables_travel_as_they_are_beside_it(tmp_path: Path) -> None:
    digests = {shape: digest(Embeddings, tmp_path / f"{shape}", shape, TOP_K) for shape in SHAPES}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("compress", at_length([TOP_K, BITS]), ids=named)
def test_a_resumed_job_ends_with_the_digest_of_the_undisturbed_one(compress: dict[str, Any], tmp_path: Path) -> None:
    """On other numbers of workers and servers: what lanes hold back and exact values are in the checkpoint."""
    whole = digest(tasks.Momentum, tmp_path / "whole", (2, 2, 2), compress)
    folder = tmp_path / "resumed"
    assert train(tasks.Momentum, folder, (3, 2, 2), compress, stop_at=3).ending == "interrupted"
    assert train(tasks.Momentum, folder, (1, 3, 1), compress, stop_at=5).ending == "interrupted"
    assert digest(tasks.Momentum, folder, (2, 1, 1), compress, links="tcp") == whole


def test_what_servers_have_not_told_is_in_the_checkpoint(tmp_path: Path) -> None:
    """The model is what workers have; the exact values lie beside it, and are others."""
    ended = train(tasks.Momentum, tmp_path, (2, 2, 1), TOP_K)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    newest = checkpoints.search().newest
    assert newest is not None
    state = checkpoints.load(newest).state
    assert newest.manifest.weights_digest == ended.digest
    model, exact = state["replica"]["tensors"], state["exact"]
    assert exact.keys() == {name for name in model if name in exact}
    assert any(not torch.equal(model[name], exact[name]) for name in exact)
    assert sorted(state["lanes"]) == ["applied", "lanes"]


@pytest.mark.parametrize("compress", at_length([TOP_K, BITS]), ids=named)
def test_workers_come_to_the_exact_values_when_nothing_changes_them(compress: dict[str, Any], tmp_path: Path) -> None:
    """The error feedback of the servers: what was not told at once is told later."""
    folder = tmp_path / "run"
    ended = train(Stopping, folder, (2, 2, 1), compress, steps=24)
    assert not ended.failures, ended.failures
    checkpoints = CheckpointFolder(folder / "checkpoints")
    newest = checkpoints.search().newest
    assert newest is not None
    state = checkpoints.load(newest).state
    for name, exact in state["exact"].items():
        torch.testing.assert_close(state["replica"]["tensors"][name], exact, rtol=1e-5, atol=1e-7)


class Stopping(tasks.Regression):
    """Learns in its first steps only."""

    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 3))
