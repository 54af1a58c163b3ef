"""A bit of one worker's summed gradient flips: tensor and worker are named before any weight has changed."""

import json
from pathlib import Path
from typing import Any

import pytest

import gang
from bits import bit_tasks as tasks
from quorate.core.errors import JobFileError

pytestmark = pytest.mark.usefixtures("unmeasured")

KEYS: dict[str, Any] = {"steps": 6, "check_gradients": {"every": 2}, "clip_norm": 1.0}
"""Clipping writes to gradients, so that each worker has its own, in shared memory too."""


def flip_at(step: int) -> Any:
    """In worker 1, in the memory of the gradient, where a sum has just been formed."""

    def sabotage(position: int, loop: Any) -> None:
        gradients, calls = loop.update.gradients, iter(range(1, 100))
        install = gradients.install

        def install_flipped(*arguments: Any, **keys: Any) -> None:
            install(*arguments, **keys)
            if next(calls) == step and position == 1:
                gradient = gradients.parameters[1].grad.detach().numpy().reshape(-1)
                gradient.view("u1")[0] ^= 1

        gradients.install = install_flipped

    return sabotage


@pytest.mark.parametrize("strategy", ["ring", "ddp"])
def test_a_flipped_bit_of_a_gradient_is_named(strategy: str, tmp_path: Path) -> None:
    spec = gang.job(tasks.Momentum, strategy=strategy, **KEYS)
    ended = gang.train(tasks.Momentum, spec, 3, tmp_path, sabotage=flip_at(4))
    assert {failure.kind for failure in ended.failures} == {"ReplicasDiffer"}
    name = [name for name, _ in tasks.Momentum().model().named_parameters()][1]
    for failure in ended.failures:
        assert failure.culprits == (1,)
        assert f"The gradients differ in step 4: worker 1 and workers 0, 2 hold different bits, first in '{name}'" in (
            failure.message
        )
        assert failure.step == 4


def test_steps_in_between_are_not_compared_and_equal_gradients_are_equal(tmp_path: Path) -> None:
    checked, plain = (
        gang.train(tasks.Momentum, gang.job(tasks.Momentum, **keys), 3, _made(tmp_path / name))
        for name, keys in (("checked", KEYS), ("plain", KEYS | {"check_gradients": None}))
    )
    assert checked.digest == plain.digest
    # Where nobody compares, the replicas are found to differ in their own time, or not at all in so few steps.
    spec = gang.job(tasks.Momentum, **KEYS | {"check_gradients": {"every": 100}})
    unseen = gang.train(tasks.Momentum, spec, 3, _made(tmp_path / "unseen"), sabotage=flip_at(6))
    assert not any("gradients differ" in failure.message for failure in unseen.failures), json.dumps(unseen.log)


def test_where_nobody_holds_the_sum_it_is_refused() -> None:
    with pytest.raises(JobFileError, match="not possible with strategy: parameter-server"):
        gang.job(tasks.Momentum, strategy="parameter-server", check_gradients={"every": 1})


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
