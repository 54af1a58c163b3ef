"""Code whose result is not a function of its lane is found by an audit, and refused with step and lane."""

import itertools
import os
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
from bits import bit_tasks
from quorate.own_loop.loop import own_loop_of
from quorate.own_loop.run import Run
from quorate.training.loop import Loop
from training import recorded

pytestmark = pytest.mark.usefixtures("unmeasured")

LATE = 12
CALLS = itertools.count()
KEPT: list[Any] = []
CACHE: dict[int, float] = {}
FILE = Path("calls")
TICKS = [0]


def late_counter(_: Any) -> float:
    calls = next(CALLS)
    return calls if calls > LATE else 0


def clock(_: Any) -> float:
    return time.time_ns() // 1000 % 1000


def system_random(_: Any) -> float:
    return random.SystemRandom().random()


def process(_: Any) -> float:
    return os.getpid() % 1000


def address(batch: Any) -> float:
    KEPT.append(batch[0])
    return id(batch[0]) // 16 % 1009


def cache_by_order(batch: Any) -> float:
    CACHE[len(CACHE)] = float(batch[0].abs().mean())
    return CACHE.get(len(CACHE) - 2, 0.0)


def file(_: Any) -> float:
    with FILE.open("a") as opened:
        opened.write("x")
    return FILE.stat().st_size


def order_of_a_set(_: Any) -> float:
    things = {object(): number for number in range(50)}
    KEPT.append(things)
    first, second, *_ = (things[thing] for thing in set(things))
    return 50 * first + second


def thread(_: Any) -> float:
    def tick() -> None:
        while True:
            TICKS[0] += 1
            time.sleep(0)

    if not TICKS[0]:
        threading.Thread(target=tick, daemon=True).start()
    return TICKS[0] % 1013


def task_with(way: Any) -> type[bit_tasks.Momentum]:
    class Impure(bit_tasks.Momentum):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return super().loss(model, batch) * (1 + way(batch) / 1000)

    Impure.__qualname__ = "Impure"
    return Impure


def counting(run: Run) -> None:
    task = bit_tasks.Momentum()
    model = task.model()
    model, _ = run.prepare(model, task.optimizer(model))
    calls, dataset = 0, task.datasets()[0]
    for _ in run.epochs():
        for inputs, targets in run.batches(dataset):
            calls = calls + 1
            scale = 1 + calls / 1000 if calls > LATE else 1.0
            run.step(scale * F.mse_loss(model(inputs).squeeze(-1), targets))


WAYS = [late_counter, clock, system_random, process, address, cache_by_order, file, order_of_a_set, thread]


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_depends_on_more_than_its_lane_is_refused(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(task_with(way), tmp_path)


def test_a_variable_of_a_loop_of_ones_own_that_acts_late_is_found(tmp_path: Path) -> None:
    spec = gang.job(own_loop_of(counting), audit={"every": 2}, epochs=3)
    failure = gang.train(own_loop_of(counting), spec, 3, tmp_path).failure
    assert failure.kind in ("UnsupportedModelError", "LanesDiffer")
    # By an audit, or by the rehearsal of a worker that joins, whichever comes first.
    assert "not to the same bits" in failure.message or "These variables differ: calls" in failure.message


@pytest.mark.parametrize("workers", [1, 2])
def test_few_workers_find_it_too(workers: int, tmp_path: Path) -> None:
    assert_refused(task_with(late_counter), tmp_path, workers)


@pytest.mark.parametrize("keys", [{}, {"lanes": 1}, {"strategy": "parameter-server"}, {"loader_workers": 1}])
@pytest.mark.parametrize("every", [1, 3])
def test_what_is_a_function_of_its_lane_passes_and_has_the_same_bits(
    every: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    spec = gang.job(bit_tasks.BatchNormAndDropout, audit={"every": every}, **keys)
    plain = gang.job(bit_tasks.BatchNormAndDropout, audit={"every": 0}, **keys)
    workers = min(3, spec.lanes)
    folders = [tmp_path / name for name in ("audited", "plain")]
    for folder in folders:
        folder.mkdir()
    audited = gang.train(bit_tasks.BatchNormAndDropout, spec, workers, folders[0])
    assert audited.digest == gang.train(bit_tasks.BatchNormAndDropout, plain, 1, folders[1]).digest
    assert audited.losses


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("keys", [{}, {"on_out_of_memory": "shrink"}, {"lanes": 2, "overlap": True, "links": "tcp"}])
def test_an_audit_that_memory_does_not_suffice_for_is_left_out(
    keys: dict[str, Any], workers: int, tmp_path: Path
) -> None:
    # The first that a worker computes is what it audits.
    calls, every = itertools.count(), 1 if workers == 1 else 200

    def short(_: Any) -> float:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 0

    spec = gang.job(task_with(short), audit={"every": every}, **keys)
    ended = gang.train(task_with(short), spec, workers, tmp_path)
    other = tmp_path / "plain"
    other.mkdir()
    pure = task_with(lambda _: 0)
    plain = gang.train(pure, gang.job(pure, audit={"every": 0}, **keys), 1, other)
    assert ended.digest == plain.digest
    assert not ended.progress.get("micro_batches"), "the step was not done again in smaller parts"


def test_what_a_worker_alone_has_begun_from_stays_until_its_first_audit(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"audit": {"every": 200}, "checkpoint": {"every": 1, "keep": 1}}
    recorded.run(bit_tasks.Momentum, tmp_path, stop_at=2, **keys)
    assert 2 in recorded.run(bit_tasks.Momentum, tmp_path, **keys).saved_steps


def test_a_refusal_names_what_differs(tmp_path: Path) -> None:
    spec = gang.job(task_with(clock), audit={"every": 1})
    message = gang.train(task_with(clock), spec, 1, tmp_path).failure.message
    assert "(the loss, the gradient of '" in message
    assert "differ)" in message


def assert_refused(task: Any, folder: Path, workers: int = 3, **keys: Any) -> None:
    spec = gang.job(task, **{"steps": 12, "audit": {"every": 2}} | keys)
    failure = gang.train(task, spec, workers, folder).failure
    assert "was computed several times, and not to the same bits" in failure.message, failure
    # Counters of two processes may stand at the same number: then it looks like the fault of a third.
    if failure.kind != "LanesDiffer":
        assert failure.kind == "UnsupportedModelError"
        assert "loss() gives another result for the same lane" in failure.message


def test_what_an_audit_computes_with_does_not_outlive_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next generation would need the memory of two, until somebody collects circles."""
    run = Loop.run

    def run_and_close(self: Loop) -> str | None:
        ended = run(self)
        assert self.audit is not None
        assert isinstance(self.audit.compute, partial), "it computes with the parts of its generation"
        self.close()
        (tmp_path / "left").write_text(repr(isinstance(self.audit.compute, partial)))
        return ended

    monkeypatch.setattr(Loop, "run", run_and_close)
    gang.train(bit_tasks.Momentum, gang.job(bit_tasks.Momentum, audit={"every": 2}), 1, tmp_path)
    assert (tmp_path / "left").read_text() == "False"
