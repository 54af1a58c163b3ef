from typing import Any

import command_task
import gang
from quorate.checkpoint.store import CheckpointFolder
from quorate.training.replica import Replica
from quorate.training.task import configure
from quorate.worker.assembly import SessionParts, build_samples


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
