import re
from types import SimpleNamespace
from typing import Any

import pytest

import command_task
import gang
from own_loop import own_loops
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import TaskError
from quorate.own_loop.loop import own_loop_of
from quorate.replica.replica import Replica
from quorate.task.run_mode import RunMode
from quorate.task.task import configure
from quorate.worker.assembly import SessionParts, build_samples, check_evaluable


def test_the_order_of_samples_is_made_once_for_all_generations(tmp_path: Any) -> None:
    asked: list[int] = []

    class Ordered(command_task.Tiny):
        def order(self, epoch: int, generator: Any) -> None:
            asked.append(epoch)

    spec = gang.job(command_task.Tiny, batch_size=8, steps=8)
    task = configure(Ordered, {}, "test", spec.seed)
    samples = build_samples(task, spec)
    parts = SessionParts(spec, task, Replica(task, spec), samples, {}, CheckpointFolder(tmp_path))
    assert parts.sampler is parts.sampler
    assert asked == [0]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (RunMode(evaluates_only=True), "call run.evaluate(dataset, measure) before the loop"),
        (RunMode(predict_to="rows"), "only a quorate.Task has predict()"),
    ],
)
def test_a_loop_that_cannot_evaluate_or_predict_says_what_to_do_instead(mode: RunMode, words: str) -> None:
    task = own_loop_of(own_loops.clipped)()
    nothing: Any = SimpleNamespace(datasets={})
    with pytest.raises(TaskError, match=re.escape(words)) as refused:
        check_evaluable(task, nothing, mode)
    assert "quorate.open_run(run).load_model() gives the model" in str(refused.value)
