"""Evaluation, spread over the workers: batches are fixed by the job and summed in order, whoever computed them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quorate.core.seeds import derive_seed
from quorate.data.feed import Feed
from quorate.data.reading import EvaluationPlan
from quorate.data.streams import seed_generators
from quorate.training.lane import LossSum
from quorate.training.measurement import measured
from quorate.training.replica import Replica
from quorate.training.strategy import Strategy
from quorate.training.task import Task, take_log


class Evaluator:
    """Evaluates the committed state."""

    def __init__(self, task: Task, replica: Replica, plan: EvaluationPlan, feed: Feed, seed: int) -> None:
        self._task = task
        self._replica = replica
        self._plan = plan
        self._feed = feed
        self._seed = seed

    def run(self, step: int, strategy: Strategy) -> dict[str, float]:
        """Metrics of the state after `step`, the same on any number of workers."""
        versions = self._replica.versions()
        with evaluation_mode(self._replica.model):
            own = {batch: self._evaluate(step, batch) for batch in self._plan.hosted_batches(strategy.hosted)}
        self._replica.check_unchanged(versions, "metrics()")
        self._replica.begin_lane()
        take_log(self._task)
        everyone = strategy.share(step, json.dumps(own).encode())
        by_batch = {int(batch): sums for payload in everyone for batch, sums in json.loads(payload).items()}
        totals: dict[str, LossSum] = {}
        for batch in sorted(by_batch):
            for name, (total, count) in by_batch[batch].items():
                totals.setdefault(name, LossSum()).add(LossSum(total, count))
        return {name: total.mean for name, total in totals.items()}

    def _evaluate(self, step: int, batch: int) -> dict[str, tuple[float, float]]:
        read = self._feed.next(self._plan.request(batch))
        if not read.samples:
            return {}
        self._replica.buffers.restore()
        seed_generators(derive_seed(self._seed, "evaluation", step, batch))
        return measured(self._task, self._replica.model, read.content, len(read.samples))


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Every layer in evaluation mode, and no gradients."""
    # Each module's own mode is put back: a task may keep some layers in evaluation mode all along.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
