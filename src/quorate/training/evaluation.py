"""Evaluation, spread over the workers: batches are fixed by the job and summed in order, whoever computed them."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from quorate.core.errors import JobError
from quorate.core.seeds import derive_seed
from quorate.data.bad_sample import LeftOut
from quorate.data.feed import Feed
from quorate.data.sampler import EvaluationPlan
from quorate.data.streams import seed_generators
from quorate.training.lane import LossSum
from quorate.training.measurement import Measured, measured
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.strategy import Strategy
from quorate.training.task import Task, take_log


@dataclass(frozen=True)
class Evaluated:
    """The metrics, and the samples that were left out as bad; `why` says of the first of these what is wrong. `notes`
    are what this worker has met with in reading, `put_back` the names of what metrics() has assigned anywhere."""

    metrics: dict[str, float]
    bad: tuple[int, ...] = ()
    why: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()


class Evaluator:
    """Evaluates the committed state; with `averaged`, the averages of its parameters. `advance` is called for each
    batch."""

    def __init__(
        self,
        task: Task,
        replica: Replica,
        plan: EvaluationPlan,
        feed: Feed,
        watch: StateWatch,
        seed: int,
        advance: Callable[[], None] = lambda: None,
        *,
        averaged: bool = False,
    ) -> None:
        self._task = task
        self._replica = replica
        self._plan = plan
        self._feed = feed
        self._watch = watch
        self._seed = seed
        self._advance = advance
        self._averaged = averaged
        self._put_back: set[str] = set()

    def run(self, step: int, strategy: Strategy) -> Evaluated:
        """What the state after `step` gives, the same on any number of workers."""
        left_out = LeftOut()
        notes: list[str] = []
        with self._weights(), evaluation_mode(self._replica.model):
            versions = self._replica.versions()
            hosted = self._plan.hosted_batches(strategy.hosted)
            own = {batch: self._evaluate(step, batch, left_out, notes) for batch in hosted}
            self._replica.check_unchanged(versions, "metrics()")
        self._replica.begin_lane()
        take_log(self._task)
        payload = json.dumps([own, left_out.indices, left_out.reasons, sorted(self._put_back)]).encode()
        everyone = [json.loads(told) for told in strategy.gather(step, payload)]
        bad = sorted(index for _, indices, _, _ in everyone for index in indices)
        why = sorted((index, text) for _, _, texts, _ in everyone for index, text in texts)
        put_back = sorted({name for *_, names in everyone for name in names})
        if len(bad) == self._plan.samples:
            raise _nothing_to_evaluate(why)
        means = _means([sums for sums, *_ in everyone])
        return Evaluated(means, tuple(bad), tuple(why), tuple(notes), tuple(put_back))

    def _weights(self) -> AbstractContextManager[None]:
        average = self._replica.average
        return average.in_place() if self._averaged and average is not None else nullcontext()

    def _evaluate(self, step: int, batch: int, left_out: LeftOut, notes: list[str]) -> Measured:
        self._advance()
        read = self._feed.next(self._plan.request(batch))
        self._put_back.update(self._watch.before_batch())
        left_out.extend(read.bad, read.why)
        notes += read.notes
        if read.is_empty:
            return {}
        self._replica.begin_batch()
        seed_generators(derive_seed(self._seed, "evaluation", step, batch))
        sums = measured(self._task, self._replica.model, read.content, len(read.samples))
        self._put_back.update(self._watch.after_batch())
        return sums


def _means(everyone: Sequence[dict[str, dict[str, tuple[float, float]]]]) -> dict[str, float]:
    by_batch = {int(batch): sums for told in everyone for batch, sums in told.items()}
    totals: dict[str, LossSum] = {}
    for batch in sorted(by_batch):
        for name, (total, count) in by_batch[batch].items():
            totals.setdefault(name, LossSum()).add(LossSum(total, count))
    return {name: total.mean for name, total in totals.items()}


def _nothing_to_evaluate(why: Sequence[tuple[int, str]]) -> JobError:
    index, text = why[0]
    return JobError(
        "Every sample of the validation set is bad and was left out (on_bad_sample: skip), so there is nothing to "
        f"evaluate on. Sample {index}: {text}. Mend the files, or decode() if it raises."
    )


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
