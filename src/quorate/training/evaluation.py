"""Evaluation, spread over the workers: batches are fixed by the job and summed in order, whoever computed them.

Metrics that are no means (`accumulated`) are merged in that order, too, by one worker, which tells the others.
"""

import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from quorate.core.digests import derive_seed
from quorate.core.errors import JobError
from quorate.data.bad_sample import LeftOut
from quorate.data.feed import Feed
from quorate.data.sampler import EvaluationPlan
from quorate.data.samples import Batch
from quorate.training.accumulated import AccumulatedMetric, compute, take_states
from quorate.training.losses import LossSum
from quorate.training.measurement import Measured, Sums, as_written, evaluation_mode, measure
from quorate.training.progress import Evaluated
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.strategy import Strategy
from quorate.training.task import Task, take_log


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
        self.watch.begin()
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
        totals: dict[str, LossSum] = {}
        for batch in sorted(by_batch):
            for name, (total, count) in by_batch[batch].items():
                totals.setdefault(name, LossSum()).add(LossSum(total, count))
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
