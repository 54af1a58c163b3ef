"""A sanity check of the evaluation before the first step, so that a mistake in metrics() shows before an epoch of
training."""

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from quorate.core.digests import derive_seed
from quorate.core.errors import MetricError, QuorateError, RequestError, TaskError, UserCodeError
from quorate.core.failure import Failure
from quorate.core.processes import ask_child
from quorate.data.sampler import EvaluationPlan
from quorate.data.samples import Samples, batch_of
from quorate.training.accumulated import compute, take_states
from quorate.training.measurement import evaluation_mode, measure
from quorate.training.progress import metric_of
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.task import Task

log = logging.getLogger(__name__)

LIMIT = 20.0
"""Seconds that it may take."""


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
    answer = ask_child(lambda: _try_in_child(task, replica, samples, plan), LIMIT)
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
