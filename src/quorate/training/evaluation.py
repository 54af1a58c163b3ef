"""Evaluation, spread over the workers: batches are fixed by the job and summed in order, whoever computed them.

Metrics that are no means (`accumulated`) are merged in that order, too, by one worker, which tells the others.

And a sanity check of it before the first step, so that a mistake in metrics() does not show after an epoch of training.
"""

import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from quorate.core.digests import derive_seed
from quorate.core.errors import JobError, MetricError, QuorateError, RequestError, TaskError, UserCodeError
from quorate.core.failure import Failure
from quorate.core.processes import ask_child
from quorate.data.bad_sample import LeftOut
from quorate.data.feed import Feed
from quorate.data.sampler import EvaluationPlan
from quorate.data.samples import Batch, Samples, batch_of
from quorate.training.accumulated import AccumulatedMetric, compute, take_states
from quorate.training.losses import LossSum
from quorate.training.measurement import Measured, Sums, as_written, evaluation_mode, measure
from quorate.training.progress import metric_of
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.strategy import Strategy
from quorate.training.task import Task, take_log

log = logging.getLogger(__name__)

SANITY_CHECK_LIMIT = 20.0
"""Seconds that the sanity check may take."""


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
        self._accumulated: dict[str, AccumulatedMetric] = {}
        self._states: dict[int, dict[str, bytes]] = {}

    def run(self, step: int, strategy: Strategy) -> Evaluated:
        """What the state after `step` gives, the same on any number of workers."""
        left_out = LeftOut()
        notes: list[str] = []
        self._accumulated, self._states = {}, {}
        self._watch.begin()
        with self._weights(), as_written(self._replica), evaluation_mode(self._replica.model):
            versions = self._replica.versions()
            hosted = self._plan.hosted_batches(strategy.hosted)
            own = {batch: self._evaluate(step, batch, left_out, notes) for batch in hosted}
            self._replica.check_unchanged(versions, "metrics()")
        self._replica.begin_lane()
        take_log(self._task)
        put_back = sorted(self._put_back)
        payload = [own, left_out.indices, left_out.reasons, put_back, sorted(self._accumulated)]
        everyone = [json.loads(told) for told in strategy.gather(step, json.dumps(payload).encode())]
        bad = sorted(index for _, indices, *_ in everyone for index in indices)
        why = sorted((index, text) for _, _, texts, *_ in everyone for index, text in texts)
        put_back = sorted({name for *_, names, _ in everyone for name in names})
        if len(bad) == self._plan.samples:
            raise _nothing_to_evaluate(why)
        metrics = _means([sums for sums, *_ in everyone])
        if any(accumulated for *_, accumulated in everyone):
            metrics |= self._compute_accumulated(step, strategy)
        return Evaluated(metrics, tuple(bad), tuple(why), tuple(notes), tuple(put_back))

    def _compute_accumulated(self, step: int, strategy: Strategy) -> dict[str, float]:
        """Each by the worker of the first batch that has it, which merges the states of all batches in order."""
        content = io.BytesIO()
        torch.save(self._states, content)
        told = strategy.gather(step, content.getvalue())
        by_batch = {batch: states for each in told for batch, states in torch.load(io.BytesIO(each)).items()}
        in_order: dict[str, list[int]] = {}
        for batch in sorted(by_batch):
            for name in by_batch[batch]:
                in_order.setdefault(name, []).append(batch)
        own: dict[str, float] = {}
        for name, batches in in_order.items():
            if batches[0] in self._states:
                self._replica.device.seed(derive_seed(self._seed, "evaluation", step, name))
                states = [by_batch[batch][name] for batch in batches]
                own |= compute(name, self._accumulated[name], states)
        computed: dict[str, float] = {}
        for each in strategy.gather(step, json.dumps(own).encode()):
            computed |= json.loads(each)
        return computed

    def _weights(self) -> AbstractContextManager[None]:
        average = self._replica.average
        return average.in_place() if self._averaged and average is not None else nullcontext()

    def _evaluate(self, step: int, batch: int, left_out: LeftOut, notes: list[str]) -> Sums:
        self._advance()
        read = self._feed.next(self._plan.request(batch))
        self._put_back.update(self._watch.before_batch())
        left_out.extend(read.bad, read.why)
        notes += read.notes
        if read.is_empty:
            return {}
        self._replica.begin_batch()
        seed = derive_seed(self._seed, "evaluation", step, batch)
        found = self._measure(batch, read, seed)
        if found.accumulated:
            self._states[batch] = take_states(found.accumulated)
            self._accumulated |= found.accumulated
        self._replica.settle()
        self._put_back.update(self._watch.after_batch())
        return found.sums

    def _measure(self, batch: int, read: Batch, seed: int) -> Measured:  # noqa: ARG002 (for whoever predicts)
        return measure(self._task, self._replica, read.content, len(read.samples), seed)


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
        f"evaluate on. Sample {index}: {text}. Repair the files, or decode() if it raises."
    )


def sanity_check_evaluation(task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan) -> None:
    """Evaluate one batch, and refuse what the first evaluation would fail on.

    In a process of its own, which ends with it: the model, the task, the generators and the dataset's files stay as
    they are. What keeps that process from an answer (a crash, its time) is no mistake in the request.
    """
    watched = _watched(replica)
    if plan.samples == 0 and watched:
        key, name = watched[0]
        raise TaskError(
            f"{key}: '{name}' is measured on the validation set, and datasets() returned none. "
            f"Return (training set, validation set), or leave {key.partition('.')[0]} out."
        )
    metrics = _metrics_of_one_batch(task, replica, samples, plan) if plan.samples else None
    if metrics is None:
        return
    try:
        for key, name in watched:
            metric_of(metrics, name, key)
    except MetricError as error:
        raise TaskError(error.message) from None


def _watched(replica: Replica) -> list[tuple[str, str]]:
    """The keys of the job that follow a metric, and its name."""
    spec = replica.spec
    best = spec.evaluate.metric or ("loss" if replica.optimizers.reacts else None)
    patient = None if spec.early_stop is None else spec.early_stop.metric
    return [(key, name) for key, name in (("evaluate.metric", best), ("early_stop.metric", patient)) if name]


def _metrics_of_one_batch(
    task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan
) -> Mapping[str, float] | None:
    if type(task).metrics is Task.metrics:  # it is the loss, which the first step tries
        return {name or "loss": 0.0 for name in replica.optimizers.by_name}
    if not replica.device.is_host:  # a forked process cannot compute there
        return None
    answer = ask_child(lambda: _try_in_child(task, replica, samples, plan), SANITY_CHECK_LIMIT)
    if not answer.text:
        log.warning("metrics() could not be tried before the first step: the process that did so %s", answer.ending)
        return None
    content: dict[str, Any] = json.loads(answer.text)
    if "failure" not in content:
        return content["metrics"]  # type: ignore[no-any-return]
    failure = Failure.from_dict(content["failure"])
    if failure.traceback:
        raise UserCodeError(failure.message, failure.traceback, RequestError.exit_code)
    raise TaskError(failure.message)


def _try_in_child(task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan) -> str:
    # One thread: those of the parent are not in this process, and waiting for them would take for ever.
    torch.set_num_threads(1)
    try:
        watch = StateWatch(task, replica)
        batch = batch_of(samples[plan.request(0)])
        watch.before_batch()
        if batch.is_empty:  # all its samples are bad, and are left out
            return ""
        with evaluation_mode(replica.model):
            seed = derive_seed(replica.spec.seed, "evaluation", 0, 0)
            found = measure(task, replica, batch.content, len(batch.samples), seed)
            computed = _computed_of_two(found.accumulated)
            watch.after_batch()
    except QuorateError as error:
        return json.dumps({"failure": Failure.of(error).to_dict()})
    return json.dumps({"metrics": {name: total for name, (total, _) in found.sums.items()} | computed})


def _computed_of_two(metrics: dict[str, AccumulatedMetric]) -> dict[str, float]:
    """What accumulated metrics give of this batch twice; 0 for one that cannot be computed of so few samples."""
    computed: dict[str, float] = {}
    for name, state in take_states(metrics).items():
        try:
            computed |= compute(name, metrics[name], [state, state])
        except UserCodeError:
            computed[name] = 0.0
    return computed
