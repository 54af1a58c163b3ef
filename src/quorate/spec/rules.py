"""What must hold between the keys of every job, each rule as the equation that does not hold, both numbers and where
they were said. Options have rules of their own."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from quorate.core.addresses import has_secret, shown_place
from quorate.core.errors import JobFileError, Problem
from quorate.spec.job import OWN_PLACE, JobSpec, LossScaleSpec
from quorate.spec.keys import AUTO, AUTO_BATCH, Section, usual_mode
from quorate.spec.options import ANY, Rules, Said, option_rules

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")


def checked_job(values: Mapping[str, Any]) -> JobSpec:
    """The job with these keys. Raises JobFileError where a rule does not hold, and pydantic's error for a wrong key."""
    job = JobSpec.model_validate(values)
    if problems := broken_rules(job):
        raise JobFileError("the job", problems)
    return job


def doubtful_modes(job: JobSpec) -> Iterator[str]:
    """Metrics by whose names the opposite of their `mode` may be meant."""
    for key, watched in (("evaluate", job.evaluate), ("early_stop", job.early_stop)):
        metric = None if watched is None else watched.metric
        if watched is not None and metric is not None and usual_mode(metric) not in (None, watched.mode):
            better = "smaller" if watched.mode == "min" else "larger"
            yield (
                f"{key}: a {better} {metric} counts as better (mode: {watched.mode}). If the opposite is meant, write "
                f"mode: {usual_mode(metric)}."
            )


def broken_rules(job: JobSpec, doubtful: Collection[str] = (), said: Said = lambda _: "") -> list[Problem]:
    """The rules that do not hold, leaving out those about keys that are in doubt already."""
    return [
        replace(problem, keys=tuple(sorted(keys - {problem.path})))
        for rule, keys in (*_RULES.items(), *option_rules().items())
        if keys.isdisjoint(doubtful)
        for problem in rule(job, said)
        if problem.path not in doubtful
    ]


def _workers_fit_lanes(job: JobSpec, said: Said) -> Iterator[Problem]:
    workers, lanes = job.workers, job.lanes
    if isinstance(workers, int) and workers > lanes and job.strategy.mesh(workers) is None:
        yield Problem(
            "workers",
            f"{workers} workers{said('workers')} cannot share {lanes} lanes{said('lanes')}: each worker hosts at least "
            f"one lane, and {workers} > {lanes}",
            f"Use at most {lanes} workers, or raise lanes (which changes what the job computes).",
        )


def _strategy_goes_with(job: JobSpec, said: Said) -> Iterator[Problem]:
    """The table of what strategies refuse: each kind says its rows."""
    for refusal in job.strategy.refusals():
        value, usual = getattr(job, refusal.key), JobSpec.model_fields[refusal.key].default
        if value == usual if refusal.value is ANY else value != refusal.value:
            continue
        what = refusal.key if isinstance(value, Section) else AUTO if value == AUTO_BATCH else str(value).lower()
        yield Problem(
            refusal.key,
            f"{what}{said(refusal.key)} is not possible with strategy: {job.strategy.kind}{said('strategy')}: "
            f"{refusal.why}",
            refusal.hint,
        )


def _fewest_workers_fit(job: JobSpec, said: Said) -> Iterator[Problem]:
    least = job.min_workers
    most_key, most = ("workers", job.workers) if isinstance(job.workers, int) else ("lanes", job.lanes)
    if least > most:
        yield Problem(
            "min_workers",
            f"the job would never begin: it waits for {least} workers{said('min_workers')} and can have "
            f"{most} ({most_key}{said(most_key)}), and {least} > {most}",
            f"Use a min_workers of at most {most}.",
        )


def _batch_feeds_lanes(job: JobSpec, said: Said) -> Iterator[Problem]:
    batch_size, lanes, accumulate = job.batch_size, job.lanes, job.accumulate
    if batch_size == AUTO_BATCH:
        return
    least = lanes * accumulate
    parts = f" × accumulate {accumulate}{said('accumulate')}" if accumulate > 1 else ""
    if batch_size < least:
        yield Problem(
            "batch_size",
            f"a batch of {batch_size}{said('batch_size')} cannot be shared by {lanes} lanes{said('lanes')}{parts}: "
            f"each gets at least one sample, and {batch_size} < {least}",
            f"Use a batch_size of at least {least}, or fewer lanes (which changes what the job computes).",
        )


def _one_length(job: JobSpec, said: Said) -> Iterator[Problem]:
    epochs, steps = job.epochs, job.steps
    if epochs is None and steps is None:
        hint = "Say how long to train: epochs: 3 or steps: 1000."
        yield Problem("epochs", "neither epochs nor steps is given", hint)
    if epochs is not None and steps is not None:
        both = f"both epochs: {epochs}{said('epochs')} and steps: {steps}{said('steps')} are given"
        yield Problem("epochs", both, "Keep exactly one of them.")


def _schedule_is_whole(job: JobSpec, said: Said) -> Iterator[Problem]:
    """Without a kind it only says how often the task's own schedule steps."""
    schedule = job.schedule
    if schedule is None or schedule.kind is not None:
        return
    if schedule.warmup or schedule.final or schedule.per is None:
        yield Problem(
            "schedule.kind",
            f"schedule{said('schedule')} has no kind",
            "Write kind: constant, linear or cosine; or only per: epoch, for a schedule that the task returns.",
        )


def _early_stop_sees_evaluations(job: JobSpec, said: Said) -> Iterator[Problem]:
    if job.early_stop is not None and job.evaluate.every == "end":
        yield Problem(
            "early_stop",
            f"it watches the evaluations during training, and with evaluate.every: end{said('evaluate.every')} there "
            "are none",
            "Use evaluate.every: epoch or a number of steps, or leave early_stop out.",
        )


def _lineage_leads_here(job: JobSpec, said: Said) -> Iterator[Problem]:
    ends = [part.until for part in job.lineage]
    there, steps = said("lineage"), job.steps
    if ends != sorted(set(ends)):
        text = f"its parts{there} end after steps {', '.join(map(str, ends))}"
        yield Problem("lineage", text, "Each begins where the one before it ends: write them in order.")
    elif ends and steps is not None and ends[-1] >= steps:
        text = f"its last part{there} ends after step {ends[-1]}, and the job after {steps}{said('steps')}"
        yield Problem("lineage", text, "Use more steps, or leave that part out.")
    if ends and job.early_stop is not None:
        text = f"a part of it{there} might end before its step by early_stop{said('early_stop')}"
        yield Problem("lineage", text, "Leave early_stop out.")


def _device_fits_strategy(job: JobSpec, said: Said) -> Iterator[Problem]:
    what = job.strategy.cpu_only
    if job.device == "cuda" and what is not None:
        yield Problem(
            "device",
            f"{what}{said('strategy')} computes on the CPU in this version, and not on device: cuda{said('device')}",
            f"Leave {what.partition(':')[0]} out, or use device: cpu.",
        )


def _loss_scale_is_used(job: JobSpec, said: Said) -> Iterator[Problem]:
    if job.precision != "fp16" and job.loss_scale != LossScaleSpec():
        yield Problem(
            "loss_scale",
            f"it{said('loss_scale')} scales nothing with precision: {job.precision}{said('precision')}",
            "Leave it out, or write precision: fp16.",
        )


def _lanes_are_recorded(job: JobSpec, said: Said) -> Iterator[Problem]:
    if job.record is not None and not job.strategy.fixes_bits:
        yield Problem(
            "record",
            f"{job.record}{said('record')} compares runs by their lanes, whose order of summation is not fixed with "
            f"this strategy{said('strategy')}",
            "Leave it out, or use strategy: ring or synchronous parameter-server.",
        )


def _growth_has_room(job: JobSpec, said: Said) -> Iterator[Problem]:
    workers, least, key = job.workers, job.min_workers, "engine.grow"
    if job.engine.grow is None:
        return
    if workers == least:
        text = f"there is nothing to choose between min_workers {least} and workers {workers}{said('workers')}"
        yield Problem(key, text, "Use a smaller min_workers, more workers, or leave grow out.")
    if job.strategy.mesh(1) is not None:
        text = f"strategy: {job.strategy.kind}{said('strategy')} keeps its number of workers while it runs"
        yield Problem(key, text, "Leave grow out.")


def _places_take_copies(job: JobSpec, said: Said) -> Iterator[Problem]:
    places = job.checkpoint.to
    key, there = "checkpoint.to", said("checkpoint.to")
    if places[:1] != [OWN_PLACE]:
        first = f"it begins with {_shown(places[0])}" if places else "it names no place"
        yield Problem(
            key,
            f"{first}{there}: a checkpoint is saved in the run's own folder, {OWN_PLACE}, before it is copied anywhere",
            f"Write {OWN_PLACE} first, and after it the places that get copies: [{OWN_PLACE}, s3://bucket/prefix].",
        )
    for place in [other for other in places[1:] if other != OWN_PLACE]:
        if has_secret(place):
            yield Problem(
                key,
                f"{_shown(place)}{there} has a password or a query in it, and the job is written down in the run",
                "Leave it out, and give it to the store's own library, in the environment or in its settings file.",
            )
            break
        if not _URL.fullmatch(place) and not PurePath(place).is_absolute():
            yield Problem(
                key,
                f"{_shown(place)}{there} is neither the absolute path of a folder nor a URL",
                f"After {OWN_PLACE}, write places such as /mnt/backup or s3://bucket/prefix.",
            )
            break
    bare = [place.rstrip("/") for place in places]
    if twice := [place for index, place in enumerate(bare) if place in bare[:index]]:
        yield Problem(key, f"{_shown(twice[0])}{there} stands there twice", "Name every place once.")


def _shown(place: str) -> str:
    # What a person has typed in the wrong place must not stand in a log.
    return f'"{shown_place(place)}"'


_RULES: Rules = {
    _workers_fit_lanes: frozenset({"workers", "lanes", "strategy"}),
    _strategy_goes_with: frozenset({"strategy"}),
    _fewest_workers_fit: frozenset({"min_workers", "workers", "lanes"}),
    _batch_feeds_lanes: frozenset({"batch_size", "lanes", "accumulate"}),
    _one_length: frozenset({"epochs", "steps"}),
    _schedule_is_whole: frozenset({"schedule"}),
    _early_stop_sees_evaluations: frozenset({"early_stop", "evaluate"}),
    _lineage_leads_here: frozenset({"lineage", "steps", "early_stop"}),
    _device_fits_strategy: frozenset({"strategy", "device"}),
    _loss_scale_is_used: frozenset({"precision", "loss_scale"}),
    _lanes_are_recorded: frozenset({"record", "strategy"}),
    _growth_has_room: frozenset({"engine", "strategy", "workers", "min_workers"}),
    _places_take_copies: frozenset({"checkpoint"}),
}
