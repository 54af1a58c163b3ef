"""Trying metrics() before the first step, so that a mistake in it does not show after an epoch of training."""

import json
import logging
from collections.abc import Mapping

import torch

from quorate.core.child import ask_child
from quorate.core.errors import MetricError, QuorateError, RequestError, TaskError, UserCodeError
from quorate.core.failure import Failure
from quorate.core.seeds import derive_seed
from quorate.data.sampler import EvaluationPlan
from quorate.data.samples import Samples, batch_of
from quorate.data.streams import seed_generators
from quorate.training.evaluation import evaluation_mode
from quorate.training.measurement import Measured, measured
from quorate.training.optimizers import SOLE
from quorate.training.progress import metric_of
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.task import Task

log = logging.getLogger(__name__)

LIMIT = 20.0


def rehearse_evaluation(task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan) -> None:
    """Evaluate one batch, and refuse what the first evaluation would fail on.

    In a process of its own, which ends with it: the model, the task, the generators and the dataset's files stay as
    they are. What keeps that process from an answer (a crash, its time) is no mistake in the request.
    """
    if plan.samples == 0:
        _refuse_watching_nothing(replica)
    elif type(task).metrics is Task.metrics:  # it is the loss, which the first step tries
        _refuse_unmeasured(replica, dict.fromkeys(_default_metrics(replica), 0.0))
    else:
        _try_metrics(task, replica, samples, plan)


def _try_metrics(task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan) -> None:
    answer = ask_child(lambda: _told(task, replica, samples, plan), LIMIT)
    if not answer.text:
        log.warning("metrics() could not be tried before the first step: the process that did so %s", answer.ending)
        return
    content = json.loads(answer.text)
    if "failure" in content:
        raise _refusal(Failure.from_dict(content["failure"]))
    _refuse_unmeasured(replica, content["metrics"])


def _refuse_unmeasured(replica: Replica, metrics: Mapping[str, float]) -> None:
    try:
        for key, name in _watched(replica):
            metric_of(metrics, name, key)
    except MetricError as error:
        raise TaskError(error.message) from None


def _default_metrics(replica: Replica) -> list[str]:
    names = list(replica.optimizers.by_name)
    return ["loss"] if names == [SOLE] else names


def _watched(replica: Replica) -> list[tuple[str, str]]:
    spec = replica.spec
    best = spec.evaluate.metric or ("loss" if replica.optimizers.reacts else None)
    patient = None if spec.early_stop is None else spec.early_stop.metric
    return [(key, name) for key, name in (("evaluate.metric", best), ("early_stop.metric", patient)) if name]


def _refuse_watching_nothing(replica: Replica) -> None:
    for key, name in _watched(replica):
        raise TaskError(
            f"{key}: '{name}' is measured on the validation set, and datasets() gave none. "
            f"Return (training set, validation set), or leave {key.partition('.')[0]} out."
        )


def _told(task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan) -> str:
    # One thread: those of the parent are not in this process, and waiting for them would take for ever.
    torch.set_num_threads(1)
    try:
        metrics = _measure(task, replica, samples, plan)
    except QuorateError as error:
        return json.dumps({"failure": Failure.of(error).to_dict()})
    if metrics is None:  # all samples of the batch are bad, and are left out
        return ""
    return json.dumps({"metrics": {name: total for name, (total, _) in metrics.items()}})


def _measure(task: Task, replica: Replica, samples: Samples, plan: EvaluationPlan) -> Measured | None:
    watch = StateWatch(task, replica)
    batch = batch_of(samples[plan.request(0)])
    watch.before_batch()
    if batch.is_empty:
        return None
    seed_generators(derive_seed(replica.spec.seed, "evaluation", 0, 0))
    with evaluation_mode(replica.model):
        sums = measured(task, replica.model, batch.content, len(batch.samples))
        watch.after_batch()
        return sums


def _refusal(failure: Failure) -> QuorateError:
    if failure.traceback:
        return UserCodeError(failure.message, failure.traceback, RequestError.exit_code)
    return TaskError(failure.message)
