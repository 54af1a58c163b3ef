"""Evaluation, spread over the workers: batches are fixed by the job and summed in order, whoever computed them.

Metrics that are no means are merged in that order, too, by one worker, which tells the others. What predict() gives is
written down by whoever computes it, and put together in the order of samples. One batch is evaluated before the first
step, so that a mistake in metrics() shows before an epoch of training.
"""

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quorate.core.digests import derive_seed
from quorate.core.errors import JobError, MetricError, QuorateError, RequestError, TaskError, UserCodeError
from quorate.core.failure import Failure
from quorate.core.processes import ask_child
from quorate.core.user_code import given, likely_slip, user_code
from quorate.data.bad_sample import LeftOut
from quorate.data.feed import Feed
from quorate.data.sampler import EvaluationPlan
from quorate.data.samples import Batch, Samples, batch_of
from quorate.replica.losses import LossSum, summed
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.storage.atomic import write_atomically
from quorate.task.hints import hint_for
from quorate.task.progress import Evaluated, metric_of
from quorate.task.task import Task, take_log
from quorate.training.measurement import (
    AccumulatedMetric,
    Measured,
    Sums,
    as_written,
    compute,
    evaluation_mode,
    measure,
    take_states,
)
from quorate.training.strategy import Strategy

log = logging.getLogger(__name__)

SANITY_LIMIT = 20.0
"""Seconds that the sanity check may take."""
SUFFIX = ".rows"
"""Of a file with what predict() gave of a batch."""


@dataclass
class Evaluator:
    """Evaluates the committed state; with `averaged`, the averages of its parameters. `advance` is called for each
    batch."""

    task: Task
    replica: Replica
    plan: EvaluationPlan
    feed: Feed
    watch: StateWatch
    seed: int
    advance: Callable[[], None] = lambda: None
    averaged: bool = False
    _put_back: set[str] = field(default_factory=set)
    _left_out: LeftOut = field(default_factory=LeftOut)
    _notes: list[str] = field(default_factory=list)
    _accumulated: dict[str, AccumulatedMetric] = field(default_factory=dict)
    _states: dict[int, dict[str, bytes]] = field(default_factory=dict)

    def run(self, step: int, strategy: Strategy) -> Evaluated:
        """What the state after `step` gives, the same on any number of workers."""
        self._left_out, self._notes, self._accumulated, self._states = LeftOut(), [], {}, {}
        self.watch.settings.begin()
        average = self.replica.average if self.averaged else None
        weights = nullcontext() if average is None else average.in_place()
        with weights, as_written(self.replica), evaluation_mode(self.replica.model):
            versions = self.replica.versions()
            own = {batch: self._evaluate(step, batch) for batch in self.plan.hosted_batches(strategy.hosted)}
            self.replica.check_unchanged(versions, "metrics()")
        self.replica.begin_lane()
        take_log(self.task)
        left_out = self._left_out
        payload = [own, left_out.indices, left_out.reasons, sorted(self._put_back), sorted(self._accumulated)]
        everyone = [json.loads(told) for told in strategy.gather(step, json.dumps(payload).encode())]
        bad = sorted(index for _, indices, *_ in everyone for index in indices)
        why = sorted((index, text) for _, _, texts, *_ in everyone for index, text in texts)
        put_back = sorted({name for *_, names, _ in everyone for name in names})
        if len(bad) == self.plan.samples:
            raise JobError(
                "Every sample of the validation set is bad and was left out (on_bad_sample: skip), so there is nothing "
                f"to evaluate on. Sample {why[0][0]}: {why[0][1]}. Repair the files, or decode() if it raises."
            )
        by_batch = {int(batch): sums for told, *_ in everyone for batch, sums in told.items()}
        parts = ((name, LossSum(*each)) for batch in sorted(by_batch) for name, each in by_batch[batch].items())
        totals = summed(parts)
        metrics = {name: total.mean for name, total in totals.items()}
        if any(accumulated for *_, accumulated in everyone):
            metrics |= self._compute_accumulated(step, strategy)
        return Evaluated(metrics, tuple(bad), tuple(why), tuple(self._notes), tuple(put_back))

    def _evaluate(self, step: int, batch: int) -> Sums:
        self.advance()
        read = self.feed.next(self.plan.request(batch))
        self._put_back.update(self.watch.before_batch())
        self._left_out.extend(read.bad, read.why)
        self._notes += read.notes
        if read.is_empty:
            return {}
        self.replica.begin_batch()
        found = self._measure(batch, read, derive_seed(self.seed, "evaluation", step, batch))
        if found.accumulated:
            self._states[batch] = take_states(found.accumulated)
            self._accumulated |= found.accumulated
        self.replica.settle()
        self._put_back.update(self.watch.after_batch())
        return found.sums

    def _measure(self, batch: int, read: Batch, seed: int) -> Measured:  # noqa: ARG002 (for whoever predicts)
        return measure(self.task, self.replica, read.content, len(read.samples), seed)

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
                self.replica.device.seed(derive_seed(self.seed, "evaluation", step, name))
                own |= compute(name, self._accumulated[name], [by_batch[batch][name] for batch in batches])
        told = strategy.gather(step, json.dumps(own).encode())
        return {name: value for each in told for name, value in json.loads(each).items()}


@dataclass
class Predictor(Evaluator):
    """Has each batch predicted in the place of its metrics, and writes the rows of a batch to a file in `folder`."""

    folder: Path = field(kw_only=True)

    def _measure(self, batch: int, read: Batch, seed: int) -> Measured:
        device = self.replica.device
        device.seed(seed)
        content, samples = device.move(read.content), read.samples.tolist()
        with user_code("predict()", hint_for), device.autocast():
            predicted = self.task.predict(self.replica.model, content)
        columns = {name: _column(name, value, len(samples)) for name, value in _named(predicted).items()}
        rows = (
            {"sample": sample} | {name: column[i] for name, column in columns.items()}
            for i, sample in enumerate(samples)
        )
        with user_code("predict()", lambda _: "A row holds numbers, texts, and lists and dicts of them."):
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
        write_atomically(self.folder / f"{batch}{SUFFIX}", text)
        return Measured({"rows": (float(len(samples)), 1.0)}, {})


def predicted_in(folder: Path) -> frozenset[int]:
    """The batches that are done."""
    return frozenset(int(file.stem) for file in folder.glob(f"*{SUFFIX}"))


def rows_in(folder: Path, constant: Callable[[str], Any] = float) -> Iterator[list[dict[str, Any]]]:
    """The rows of each batch, in order; `constant` reads what JSON has no number for: NaN, Infinity, -Infinity."""
    for batch in sorted(predicted_in(folder)):
        lines = (folder / f"{batch}{SUFFIX}").read_text().splitlines()
        yield [json.loads(line, parse_constant=constant) for line in lines]


def _named(predicted: Any) -> Mapping[str, Any]:
    if not isinstance(predicted, Mapping):
        return {"prediction": predicted}
    return {str(name): value for name, value in predicted.items()}


def _column(name: str, value: Any, samples: int) -> list[Any]:
    """A value for each sample, of tensors and arrays as numbers and lists of them."""
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(rows, list | tuple) or len(rows) != samples:
        many = f", which has {len(rows)} rows" if isinstance(rows, list | tuple) else ""
        raise MetricError(
            f"predict() returned {given(value)} as '{name}'{many}, for a batch of {samples} samples: give a row for "
            f"each of them, in their order.{likely_slip(value)}"
        )
    return [row.tolist() if hasattr(row, "tolist") else row for row in rows]


def sanity_check_evaluation(task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan) -> None:
    """Evaluate one batch, and refuse what the first evaluation would fail on.

    In a process of its own, which ends with it: the model, the task, the generators and the dataset's files stay as
    they are. What keeps that process from an answer (a crash, its time) is no mistake in the request.
    """
    spec = replica.spec
    best = spec.evaluate.metric or ("loss" if replica.optimizers.reacts else None)
    patient = None if spec.early_stop is None else spec.early_stop.metric
    watched = [(key, name) for key, name in (("evaluate.metric", best), ("early_stop.metric", patient)) if name]
    if plan.samples == 0:
        for key, name in watched:
            raise TaskError(
                f"{key}: '{name}' is measured on the validation set, and datasets() returned none. "
                f"Return (training set, validation set), or leave {key.partition('.')[0]} out."
            )
        return
    if (metrics := _metrics_of_one_batch(task, replica, samples, plan)) is not None:
        try:
            for key, name in watched:
                metric_of(metrics, name, key)
        except MetricError as error:
            raise TaskError(error.message) from None


def _metrics_of_one_batch(
    task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan
) -> Mapping[str, float] | None:
    if type(task).metrics is Task.metrics:  # it is the loss, which the first step tries
        return {name or "loss": 0.0 for name in replica.optimizers.by_name}
    if not replica.device.is_host:  # a forked process cannot compute there
        return None
    answer = ask_child(lambda: _try_in_child(task, replica, samples, plan), SANITY_LIMIT)
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
            metrics = {name: total for name, (total, _) in found.sums.items()}
            for name, state in take_states(found.accumulated).items():
                try:
                    metrics |= compute(name, found.accumulated[name], [state, state])
                except UserCodeError:  # of so few samples it cannot be computed
                    metrics[name] = 0.0
            watch.after_batch()
    except QuorateError as error:
        return json.dumps({"failure": Failure.of(error).to_dict()})
    return json.dumps({"metrics": metrics})
