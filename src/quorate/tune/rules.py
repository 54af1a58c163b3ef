"""What must hold between the keys of a search, and between its space and the job: each rule with its numbers."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quorate.core.addresses import has_secret
from quorate.core.errors import JobFileError, Problem
from quorate.spec.job import CHANGEABLE, JobSpec, mark_of
from quorate.spec.keys import Mark
from quorate.spec.load import resolve_layers
from quorate.spec.options import Said as Told
from quorate.spec.override import Layers, Override
from quorate.spec.problems import Origin, in_brackets
from quorate.spec.resolved import ResolvedJob
from quorate.tune.spec import (
    AshaSpec,
    DimensionSpec,
    GridSpec,
    OptunaSpec,
    PbtSpec,
    RandomSpec,
    SearchSpec,
)

_TRIED = 200
"""So many trials are put together before any of them begins, to see whether their values go together."""
_LENGTHS = ("epochs", "steps")
Job = ResolvedJob | None


def _modes_fit(spec: SearchSpec, _: Job, told: Told) -> Iterator[Problem]:
    names, mode = spec.metrics, spec.mode
    if mode is None:
        which = f"whether {' and '.join(names)} should be small or large is not known"
        yield Problem("mode", which, "Write mode: max, or mode: min.")
    elif isinstance(mode, list) and len(mode) != len(names):
        text = f"the list has {len(mode)}{told('mode')}, and there are {len(names)} metrics{told('metric')}"
        yield Problem("mode", text, "Give one for each, in the same order.")
    if len(set(names)) != len(names):
        yield Problem("metric", f"a metric stands there twice{told('metric')}", "Name every metric once.")


def _one_metric_to_judge_by(spec: SearchSpec, _: Job, told: Told) -> Iterator[Problem]:
    kind = spec.scheduler.kind
    if len(spec.metrics) > 1 and kind != "none":
        text = (
            f"{kind}{told('scheduler')} stops trials by one metric, and {len(spec.metrics)} are given{told('metric')}"
        )
        yield Problem("scheduler", text, "Use scheduler: none, or one metric.")


def _trials_are_evaluated(spec: SearchSpec, job: Job, told: Told) -> Iterator[Problem]:
    if job is None or spec.scheduler.kind == "none":
        return
    kind, evaluate = spec.scheduler.kind, job.spec.evaluate
    said = in_brackets(job.origins.get("evaluate.every", ""))
    if evaluate.every == "end":
        proposed = "epoch" if job.spec.steps is None else max(1, job.spec.steps // 10)
        yield Problem(
            "scheduler",
            f"{kind}{told('scheduler')} judges trials by their evaluations during training, and with evaluate.every: "
            f"end{said} there are none",
            f"Write evaluate: {{every: {proposed}}} in the job.",
        )
    length = spec.scheduler.interval if isinstance(spec.scheduler, PbtSpec) else None
    if length is not None and isinstance(evaluate.every, int) and length % evaluate.every:
        yield Problem(
            "scheduler.interval",
            f"after {length} steps{told('scheduler.interval')} there is no evaluation to judge by: evaluate.every is "
            f"{evaluate.every}{said}",
            f"Use a multiple of {evaluate.every}.",
        )
    if (
        isinstance(spec.scheduler, AshaSpec)
        and job.spec.steps is not None
        and (spec.scheduler.grace or 0) >= job.spec.steps
    ):
        grace = spec.scheduler.grace
        yield Problem(
            "scheduler.grace",
            f"trials end after {job.spec.steps} steps{in_brackets(job.origins.get('steps', ''))}, before they are "
            f"judged: {grace}{told('scheduler.grace')} >= {job.spec.steps}",
            f"Use a grace below {job.spec.steps}.",
        )


def _search_ends(spec: SearchSpec, job: Job, told: Told) -> Iterator[Problem]:
    budget = spec.budget
    if spec.space is not None and spec.trials is None and budget.minutes is None and budget.steps is None:
        yield Problem(
            "budget",
            "nothing ends the search",
            "Write budget: {trials: 20}, or minutes or steps of all trials together.",
        )
    if budget.steps is None or job is None:
        return
    needed, why = job.spec.steps or 1, f"a trial takes {job.spec.steps} steps"
    if spec.scheduler.kind != "none":
        grace = spec.scheduler.grace if isinstance(spec.scheduler, AshaSpec) else None
        every = job.spec.evaluate.every
        needed = grace or (every if isinstance(every, int) else 1)
        why = f"a trial is first judged after {needed} steps"
    if budget.steps < needed:
        yield Problem(
            "budget.steps",
            f"it allows no trial: {why}, and {budget.steps}{told('budget.steps')} < {needed}",
            f"Use at least {needed}, or shorter trials.",
        )


def _grid_fits(spec: SearchSpec, _: Job, told: Told) -> Iterator[Problem]:
    size, trials = spec.grid_size, spec.budget.trials
    if trials is not None and size > trials:
        yield Problem(
            "budget.trials",
            f"the grid has {size} combinations, and {trials}{told('budget.trials')} < {size}: those at its end would "
            "never be tried",
            f"Use trials: {size}, a smaller grid, or algorithm: random with choice.",
        )


def _algorithm_takes_space(spec: SearchSpec, _: Job, told: Told) -> Iterator[Problem]:
    for key, dimension in (spec.space or {}).items():
        path, said = f"space.{key}", told(f"space.{key}")
        if isinstance(spec.algorithm, GridSpec) and dimension.values is None:
            text = f"algorithm: grid{told('algorithm')} needs a list of values, and a {dimension.kind}{said} has no end"
            yield Problem(path, text, "Write grid: [0.1, 0.01], or give the range a step.")
        if isinstance(spec.algorithm, OptunaSpec) and dimension.kind == "grid":
            text = f"algorithm: optuna{told('algorithm')} chooses values by itself, and goes through no grid{said}"
            yield Problem(path, text, "Write choice instead of grid.")
        if isinstance(spec.algorithm, OptunaSpec) and dimension.is_log and dimension.step is not None:
            text = f"algorithm: optuna{told('algorithm')} knows no steps in a logarithmic range{said}"
            yield Problem(path, text, "Leave step out, or write choice.")


def _lengths_are_equal(spec: SearchSpec, _: Job, told: Told) -> Iterator[Problem]:
    if spec.scheduler.kind == "none":
        return
    for key in _LENGTHS:
        if key in (spec.space or {}):
            text = (
                f"{spec.scheduler.kind}{told('scheduler')} compares trials that are equally long{told(f'space.{key}')}"
            )
            yield Problem(f"space.{key}", text, f"Set {key} in the job, or use scheduler: none.")


def _population_is_one(spec: SearchSpec, job: Job, told: Told) -> Iterator[Problem]:
    if not isinstance(spec.scheduler, PbtSpec):
        return
    said, trials = told("scheduler"), spec.budget.trials
    if not isinstance(spec.algorithm, RandomSpec):
        text = f"pbt{said} changes params by itself, after trials that were drawn, and not by {spec.algorithm.kind}"
        yield Problem("algorithm", f"{text}{told('algorithm')}", "Leave algorithm out.")
    if trials is None:
        yield Problem("budget.trials", f"pbt{said} needs to know how many trials there are", "Write trials: 8.")
    elif trials * spec.scheduler.quantile < 1:
        least = -(-1 // spec.scheduler.quantile)
        text = f"of {trials} trials{told('budget.trials')} a {spec.scheduler.quantile:g} part is less than one"
        yield Problem("budget.trials", text, f"Use at least {least:g} trials, or a larger quantile (0.5 at most).")
    if job is not None and job.spec.early_stop is not None:
        text = f"trials of pbt{said} wait for each other, and early_stop would end some of them"
        yield Problem("scheduler", text, "Leave early_stop out of the job.")
    for key, dimension in (spec.space or {}).items():
        path, told_key = f"space.{key}", told(f"space.{key}")
        if dimension.kind == "grid":
            yield Problem(path, f"pbt{said} goes through no grid{told_key}", "Write choice instead of grid.")
        if key.partition(".")[0] not in CHANGEABLE and mark_of_space(key) is Mark.MEANING and key not in _LENGTHS:
            text = (
                f"it cannot change while a trial continues from the checkpoint of another, as pbt does{said}{told_key}"
            )
            yield Problem(path, text, "Search over params, clip_norm or schedule; or use another scheduler.")


def _address_has_no_secret(spec: SearchSpec, _: Job, told: Told) -> Iterator[Problem]:
    if has_secret(spec.address):
        text = f"there is a secret in it{told('address')}, and whoever sees the search would read it"
        yield Problem("address", text, "Ray's own token is in RAY_AUTH_TOKEN.")


def _engine_can_do_it(spec: SearchSpec, _: Job, told: Told) -> Iterator[Problem]:
    if spec.engine != "local":
        return
    here = f"trials are processes of this machine{told('engine')}"
    if spec.address != "local":
        text = f"{here}, and address{told('address')} names a cluster"
        yield Problem("engine", text, "Leave engine or address out.")
    if isinstance(spec.scheduler, PbtSpec):
        text = f"pbt{told('scheduler')} needs Ray, and {here}"
        yield Problem("engine", text, "Leave engine out, or use another scheduler.")


_RULES: dict[Callable[[SearchSpec, Job, Told], Iterator[Problem]], frozenset[str]] = {
    _modes_fit: frozenset({"metric", "mode"}),
    _one_metric_to_judge_by: frozenset({"metric", "scheduler"}),
    _trials_are_evaluated: frozenset({"scheduler"}),
    _search_ends: frozenset({"budget", "space", "algorithm", "scheduler"}),
    _grid_fits: frozenset({"budget", "space", "algorithm"}),
    _algorithm_takes_space: frozenset({"algorithm"}),
    _lengths_are_equal: frozenset({"scheduler"}),
    _population_is_one: frozenset({"scheduler", "algorithm", "budget"}),
    _address_has_no_secret: frozenset({"address"}),
    _engine_can_do_it: frozenset({"engine", "address", "scheduler"}),
}
"""Each with its keys: it can be judged only when all of them are valid by themselves."""


def broken_search_rules(spec: SearchSpec, job: Job, doubtful: Collection[str], told: Told) -> list[Problem]:
    """The rules that do not hold, leaving out those about keys that are wrong already."""
    return [
        problem
        for rule, keys in _RULES.items()
        if keys.isdisjoint(doubtful)
        if job is not None or "mode" not in keys  # which may be said in the job
        for problem in rule(spec, job, told)
    ]


def mark_of_space(key: str) -> Mark | None:
    """Of a key of the job; None where there is no such key."""
    return mark_of(key) if key.partition(".")[0] in JobSpec.model_fields else None


def space_problems(spec: SearchSpec, job: ResolvedJob, doubtful: Collection[str], origin: Origin) -> list[Problem]:
    """Keys of the space that the job does not have, or that make no difference; and values that it refuses."""
    problems: list[Problem] = []
    base = Layers(job.spec.model_dump(), job.origins)
    for key, dimension in (spec.space or {}).items():
        said = origin(f"space.{key}")
        if why := _no_key_to_search(key):
            problems.append(Problem(f"space.{key}", f"{why[0]}{in_brackets(said)}", why[1]))
            continue
        problems += _refused_values(base, key, dimension, said, spec.space or {})
    if not problems and "space" not in doubtful and "algorithm" not in doubtful and spec.space:
        problems += _refused_trials(spec, base, origin)
    return problems


def _no_key_to_search(key: str) -> tuple[str, str] | None:
    first = key.partition(".")[0]
    if key == "params":
        return "it is a mapping of all of the task's parameters", "Name one of them: params.learning_rate."
    if first in ("evaluate", "task", "lineage"):
        return "trials that differ in it cannot be compared", "Set it in the job."
    mark = mark_of_space(key)
    if mark in (Mark.MANNER, Mark.LABEL):
        return "it changes nothing in what a job produces", "Set it in the job; a trial's workers are trial.workers."
    return None


def _refused_values(
    base: Layers, key: str, dimension: DimensionSpec, said: str, space: Collection[str]
) -> list[Problem]:
    """Told once for each value; a key that there is not, once."""
    problems: dict[str, Problem] = {}
    for value in dimension.probes:
        for problem in _refused(base, {key: value}, said):
            if any(other in space and other != key for other in (problem.path, *problem.keys)):
                continue  # trials have another value there: they are tried as a whole
            text = problem.text
            if (inside := _inside(problem.path, key)) is None and text.startswith("it "):
                text = f"{problem.path} {text.removeprefix('it ')}"  # such as a section's kind, which the job has not
            problems.setdefault(text, replace(problem, path=f"space.{key}{inside or ''}", text=text))
    if unknown := [problem for problem in problems.values() if problem.text.startswith("there is no such key")]:
        return unknown[:1]
    if problems and dimension.kind in ("uniform", "loguniform"):
        ends = [int(dimension.low), int(dimension.high)]
        if not any(_refused(base, {key: end}, said) for end in ends):
            text = f"a {dimension.kind} range has fractions in it, and this key takes whole numbers{in_brackets(said)}"
            return [Problem(f"space.{key}", text, f"Write randint: {ends}.")]
    return list(problems.values())


def _inside(path: str, key: str) -> str | None:
    """Which part of a key a path is; None where it is of another key."""
    rest = path.removeprefix(key)
    return rest if path.startswith(key) and rest[:1] in ("", ".", "[") else None


def _refused(base: Layers, params: Mapping[str, Any], said: str | Mapping[str, str]) -> Sequence[Problem]:
    origins = {key: said if isinstance(said, str) else said[key] for key in params}
    try:
        resolve_layers(base, "the job", {}, [Override(key, value, origins[key]) for key, value in params.items()])
    except JobFileError as error:
        return error.problems
    return ()


def _refused_trials(spec: SearchSpec, base: Layers, origin: Origin) -> list[Problem]:
    """Values that are right one by one, and wrong together: of trials that are known before any of them has run."""
    if isinstance(spec.algorithm, OptunaSpec):
        return []
    origins = {key: origin(f"space.{key}") for key in spec.space or {}}
    for trial in range(1, min(spec.trials or _TRIED, _TRIED) + 1):
        problems = _refused(base, spec.params(trial), origins)
        if problems:
            return [replace(one, path=f"space.{one.path}", text=f"in trial {trial}, {one.text}") for one in problems]
    return []
