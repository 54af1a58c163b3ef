"""Compression with parameter servers: one digest on any number of workers and servers, and through a checkpoint."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits import bit_tasks as tasks
from bits.shapes import Shape, one_digest, trained
from bits.sparse_tasks import Embeddings
from bits.test_compressed_bits import BITS, COMPRESS, TASKS, TOP_K, named, newest_in
from quorate.task.task import Task

pytestmark = pytest.mark.usefixtures("unmeasured")

SMALL: dict[str, Any] = {"bucket_mb": 0.0002}
"""Buckets so small that there are several."""
SHAPES = [Shape(2, 2, 2), Shape(1, 3, 2)]


def at_length(values: Sequence[Any], quick: int = 1) -> list[Any]:
    """Of several cases the first few for every day, and the others for when there is time."""
    return [
        pytest.param(*([v] if isinstance(v, dict) else v), marks=pytest.mark.long if i >= quick else ())
        for i, v in enumerate(values)
    ]


def train(task: type[Task], folder: Path, shape: Shape, compress: dict[str, Any] | None, **keys: Any) -> gang.Ended:
    return trained(task, folder, shape, strategy={"compress": compress}, **{**SMALL, **keys})


def assert_one_digest(task: type[Task], folder: Path, *shapes: Shape, compress: dict[str, Any], **keys: Any) -> str:
    return one_digest(task, folder, *shapes, strategy={"compress": compress}, **{**SMALL, **keys})


@pytest.mark.parametrize("compress", at_length([BITS, TOP_K], quick=2), ids=named)
def test_any_number_of_workers_and_servers_gives_one_digest(compress: dict[str, Any], tmp_path: Path) -> None:
    """Over TCP as in shared memory."""
    assert_one_digest(tasks.Momentum, tmp_path, Shape(1, 1), Shape(3, 2, 2, links="tcp"), compress=compress)


@pytest.mark.long
@pytest.mark.parametrize("compress", COMPRESS, ids=named)
def test_every_shape_over_every_link_gives_one_digest(compress: dict[str, Any], tmp_path: Path) -> None:
    shapes = [Shape(*shape) for shape in product((1, 2, 3), (1, 2, 3), (1, 2), ("auto", "tcp"))]
    assert_one_digest(tasks.Momentum, tmp_path, *shapes, Shape(2, 3, 2, hosts="AABBC"), compress=compress)


@pytest.mark.parametrize("compress", at_length([TOP_K | {"feedback": False}, BITS | {"feedback": False}]), ids=named)
def test_without_feedback_it_is_the_digest_of_the_compressed_ring(compress: dict[str, Any], tmp_path: Path) -> None:
    """Then servers answer with values as they are: what lanes send has the same sum, whoever adds it up."""
    shapes = Shape(2), Shape(3, 2, 2)
    assert_one_digest(tasks.TinyTransformer, tmp_path, *shapes, compress=compress, clip_norm=1.0)


@pytest.mark.parametrize(("task", "keys"), at_length(TASKS[1:]), ids=named)
def test_any_task_gives_one_digest(task: type[Task], keys: dict[str, Any], tmp_path: Path) -> None:
    assert_one_digest(task, tmp_path, *SHAPES, compress=TOP_K, **keys)


def test_averages_follow_what_workers_have(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"average": {"decay": 0.9}, "checkpoint": {"every": 2}}
    assert_one_digest(tasks.Momentum, tmp_path, *SHAPES, compress=TOP_K, **keys)


@pytest.mark.long
def test_rows_of_tables_travel_as_they_are_beside_it(tmp_path: Path) -> None:
    assert_one_digest(Embeddings, tmp_path, *SHAPES, compress=TOP_K)


@pytest.mark.parametrize("compress", at_length([TOP_K, BITS]), ids=named)
def test_a_resumed_job_ends_with_the_digest_of_the_undisturbed_one(compress: dict[str, Any], tmp_path: Path) -> None:
    """On other numbers of workers and servers: what lanes hold back and exact values are in the checkpoint."""
    whole = train(tasks.Momentum, tmp_path / "whole", Shape(2, 2, 2), compress).digest
    folder = tmp_path / "resumed"
    for shape, stop_at in ((Shape(3, 2, 2), 3), (Shape(1, 3), 5)):
        assert train(tasks.Momentum, folder, shape, compress, stop_at=stop_at).ending == "interrupted"
    assert train(tasks.Momentum, folder, Shape(2, 1, links="tcp"), compress).digest == whole


def test_what_servers_have_not_told_is_in_the_checkpoint(tmp_path: Path) -> None:
    """The model is what workers have; the exact values lie beside it, and are others."""
    ended = train(tasks.Momentum, tmp_path, Shape(2, 2), TOP_K)
    newest, state = newest_in(tmp_path)
    assert newest.manifest.weights_digest == ended.digest
    model, exact = state["replica"]["tensors"], state["exact"]
    assert exact.keys() == {name for name in model if name in exact}
    assert any(not torch.equal(model[name], exact[name]) for name in exact)
    assert sorted(state["lanes"]) == ["applied", "lanes"]


@pytest.mark.parametrize("compress", at_length([TOP_K, BITS]), ids=named)
def test_workers_come_to_the_exact_values_when_nothing_changes_them(compress: dict[str, Any], tmp_path: Path) -> None:
    """The error feedback of the servers: what was not told at once is told later."""
    assert train(Stopping, tmp_path, Shape(2, 2), compress, steps=24).digest
    _, state = newest_in(tmp_path)
    for name, exact in state["exact"].items():
        torch.testing.assert_close(state["replica"]["tensors"][name], exact, rtol=1e-5, atol=1e-7)


class Stopping(tasks.Regression):
    """Learns in its first steps only."""

    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 3))
