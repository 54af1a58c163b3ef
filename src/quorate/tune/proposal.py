"""A search and its task: values that the task would refuse, and a space for a search that has none.

The space is proposed from the names, types and values of the task's params.
"""

import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, Literal, get_args, get_origin

from quorate.api.tasks import TaskLocation
from quorate.core.errors import JobFileError, Problem, QuorateError, RequestError
from quorate.core.installation import install_of
from quorate.spec.job import JobSpec
from quorate.spec.keys import nearest
from quorate.spec.problems import Origin, in_brackets
from quorate.spec.yaml_document import write_value
from quorate.tune.loading import ResolvedSearch, SearchReading
from quorate.tune.rules import broken_search_rules
from quorate.tune.spec import DimensionSpec, PbtSpec, SearchSpec

FORK = multiprocessing.get_context("fork")
PROPOSED = "proposed"
_RATES = re.compile(r"lr|learning_rate|.*_lr|.*_learning_rate|step_size")
_DECAYS = re.compile(r".*decay|l2|.*regulari[sz]ation")
_MOMENTA = re.compile(r"momentum|beta_?1?")
_DROPOUTS = re.compile(r".*drop.*")
_SMOOTHINGS = re.compile(r".*smoothing|.*noise")
_WIDTHS = re.compile(r".*(width|hidden|channels|units|filters|features|embed|dim|planes|neurons|size).*")
_DEPTHS = re.compile(r".*(depth|layers|blocks)")
_FIXED = re.compile(r".*(seed|class|vocab|image|input|output|context|sequence|length|workers|batch).*")

Fields = Mapping[str, tuple[Any, Any]]
"""Name → (type, default)."""
Refused = Callable[[dict[str, Any]], list[Problem]]
"""What the task would refuse of its params."""


def with_task(reading: SearchReading, meanwhile: Callable[[SearchSpec], None] | None = None) -> ResolvedSearch:
    """A search that was checked against its task; a space is proposed where it has none.

    All mistakes are told at once, those in the params of the task among them. With `meanwhile` another process imports
    the task, and this one calls that at the same time.
    """
    if not reading.problems:
        refuse_missing_library(reading.spec)
    asked = Asked()
    if reading.job is not None:
        ask = partial(_asked_task, reading.spec, reading.job.spec, reading.origin)
        try:
            asked = ask() if meanwhile is None else _asked_by_another(ask, partial(meanwhile, reading.spec))
            reading.problems += asked.problems
        except QuorateError:
            reading.accepted()  # other mistakes are told first
            raise
    return _with_proposal(reading.accepted(), asked.space)


def refuse_missing_library(spec: SearchSpec) -> None:
    """Before the task is imported, which may take long: what runs the trials must be installed."""
    needed = []
    if spec.runs_on_ray:
        key = "address" if spec.address != "local" else "scheduler" if spec.engine is None else "engine"
        needed.append((key, "ray", "ray"))
    if needs_optuna(spec):
        needed.append(("algorithm" if spec.algorithm.kind == "optuna" else "scheduler", "optuna", "tune"))
    for key, library, extra in needed:
        if find_spec(library) is None:
            value = getattr(spec, key)
            raise RequestError(
                f"{key}: {getattr(value, 'kind', value)} needs the library {library}, which is not installed here: "
                f"{install_of(extra)}."
            )


def needs_optuna(spec: SearchSpec) -> bool:
    """For its sampler or its pruners."""
    return spec.algorithm.kind == "optuna" or spec.scheduler.kind in ("asha", "hyperband")


def proposal_lines(search: ResolvedSearch) -> list[str]:
    """The space as it could stand in the search file, if it was proposed; to be shown before it is used."""
    space = {
        key: dimension
        for key, dimension in (search.spec.space or {}).items()
        if search.origins.get(f"space.{key}", "").startswith(PROPOSED)
    }
    width = max((len(key) for key in space), default=0) + 1
    return [f"{key + ':':{width}} {write_value(each.model_dump(exclude_none=True))}" for key, each in space.items()]


@dataclass(frozen=True)
class Asked:
    """What a task says of a search: what it would refuse, and the space that can be proposed for it."""

    problems: list[Problem] = field(default_factory=list)
    space: dict[str, DimensionSpec] = field(default_factory=dict)


def _asked_task(spec: SearchSpec, job: JobSpec, origin: Origin) -> Asked:
    from quorate.task.task import parameters_of, params_problems

    is_population = isinstance(spec.scheduler, PbtSpec)
    with TaskLocation(job.task).loaded(job.seed) as task_type:
        problems = list(_refused_values(spec, job, origin, lambda params: params_problems(task_type, params)))
        if not problems and is_population:
            problems = list(_reshaping_values(spec, job, origin, task_type))
        return Asked(problems, propose(parameters_of(task_type), job.params, changes_on_the_way=is_population))


def _asked_by_another(ask: Callable[[], Asked], meanwhile: Callable[[], None]) -> Asked:
    """By a fork, which takes torch and what the task imports with it when it ends. It ends with this process: an
    executor would wait for a task that takes long to import."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_answer, args=(ask, sender), daemon=True)
    process.start()
    sender.close()
    meanwhile()
    try:
        answer: Asked | QuorateError = receiver.recv()
    except EOFError:  # the task has ended its process: see here how
        answer = ask()
    process.join()
    if isinstance(answer, QuorateError):
        raise answer
    return answer


def _answer(ask: Callable[[], Asked], sender: Connection) -> None:
    # What ends a search ends this too, without a traceback of the task's imports.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        sender.send(ask())
    except QuorateError as error:
        sender.send(error)


def _refused_values(spec: SearchSpec, job: JobSpec, origin: Origin, refused: Refused) -> Iterator[Problem]:
    of_job = refused(job.params)
    yield from (problem for problem in of_job if problem.path not in (spec.space or {}))
    for key, dimension in (spec.space or {}).items():
        name = key.removeprefix("params.")
        if name == key or "." in name:
            continue
        said, told = in_brackets(origin(f"space.{key}")), {problem.text for problem in of_job}
        for value in dimension.probes:
            for problem in refused({**job.params, name: value}):
                if problem.path.partition("[")[0] == key and problem.text not in told:
                    told.add(problem.text)
                    is_range = dimension.kind in ("uniform", "loguniform")
                    needs_whole = is_range and not refused({**job.params, name: int(value)})
                    hint = "Use randint." if needs_whole else problem.hint.replace("params.", "space.params.")
                    yield Problem(f"space.{problem.path}", f"{problem.text}{said}", hint)


def _reshaping_values(spec: SearchSpec, job: JobSpec, origin: Origin, task_type: type[Any]) -> Iterator[Problem]:
    """Params that a population cannot change on the way: the checkpoint of one trial must fit the model of another."""
    for key, dimension in (spec.space or {}).items():
        name = key.removeprefix("params.")
        if name == key or "." in name:
            continue
        shapes = [_shapes(task_type, {**job.params, name: value}, job.seed) for value in dimension.probes]
        if any(None not in (shapes[0], each) and each != shapes[0] for each in shapes):
            text = (
                "it changes the shapes of the model's tensors, and with pbt a trial continues from the checkpoint of "
                f"another{in_brackets(origin(f'space.{key}'))}"
            )
            yield Problem(f"space.{key}", text, "Leave it out of the space, or use another scheduler.")


def _shapes(task_type: type[Any], params: dict[str, Any], seed: int) -> dict[str, tuple[int, ...]] | None:
    """Of all tensors of the task's model; None where it cannot be built without memory: then its trials tell."""
    import torch

    from quorate.data.streams import preserved_generators
    from quorate.task.task import configure

    try:
        with preserved_generators(), torch.device("meta"):
            model = configure(task_type, params, "space", seed).model()
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    except Exception:  # of the user's code, which may need numbers
        return None


def _with_proposal(search: ResolvedSearch, space: dict[str, DimensionSpec]) -> ResolvedSearch:
    if search.spec.space is not None:
        return search
    task = search.job.spec.task.rpartition(":")[2]
    if not space:
        raise RequestError(
            f"{search.source}: there is no space, and none can be proposed: {task} has no typed params whose names "
            "say what they are. Write space: {params.learning_rate: {loguniform: [1e-4, 1]}}."
        )
    origins = {f"space.{key}": f"{PROPOSED} from {task}.{key.removeprefix('params.')}" for key in space}
    rest = {key: said for key, said in search.origins.items() if key != "space"}
    found = replace(search, spec=search.spec.model_copy(update={"space": space}), origins={**rest, **origins})
    # What could not be judged without a space.
    problems = broken_search_rules(found.spec, found.job, (), lambda key: in_brackets(found.origins.get(key, "")))
    if problems:
        raise JobFileError(search.source, problems)
    return found


def propose(fields: Fields, params: Mapping[str, Any], *, changes_on_the_way: bool = False) -> dict[str, DimensionSpec]:
    """A space round the values that the params have now, by their names; what tells nothing is left as it is.

    What `changes_on_the_way` must not change the shape of a model: then only numbers with fractions are proposed.
    """
    space = {}
    for name, (kind, default) in fields.items():
        value = params.get(name, default)
        dimension = _round(name.lower(), kind, value)
        if dimension is not None and not (changes_on_the_way and type(value) is not float):
            space[f"params.{name}"] = dimension
    return space


def _round(name: str, kind: Any, value: Any) -> DimensionSpec | None:
    if get_origin(kind) is Literal:
        return DimensionSpec(choice=list(get_args(kind))) if len(get_args(kind)) > 1 else None
    if type(value) is bool:
        return DimensionSpec(choice=[False, True])
    if _FIXED.fullmatch(name):
        return None
    if type(value) is int:
        return _round_whole(name, value)
    return _round_number(name, value) if type(value) is float else None


def _round_number(name: str, value: float) -> DimensionSpec | None:
    if _DROPOUTS.fullmatch(name):
        return DimensionSpec(uniform=[0.0, max(0.5, min(value, 0.9))])
    if _SMOOTHINGS.fullmatch(name):
        return DimensionSpec(uniform=[0.0, max(0.2, min(2 * value, 1.0))])
    if _MOMENTA.fullmatch(name):
        return DimensionSpec(uniform=[min(0.5, value), max(0.99, value)]) if value < 1 else None
    if value <= 0:
        return DimensionSpec(loguniform=[1e-6, 1e-2]) if value == 0 and _DECAYS.fullmatch(name) else None
    if _RATES.fullmatch(name) or _DECAYS.fullmatch(name):
        return DimensionSpec(loguniform=[_digits(value / 10), _digits(min(value * 10, max(value, 1.0)))])
    # A fraction, by the look of it, stays one.
    top = value * 3 if value > 1 else min(value * 3, 1.0)
    return DimensionSpec(loguniform=[_digits(value / 3), _digits(top)])


def _round_whole(name: str, value: int) -> DimensionSpec | None:
    if _DEPTHS.fullmatch(name) and 1 <= value < 8:
        return DimensionSpec(randint=[max(1, value - 1), value + 1])
    if (_WIDTHS.fullmatch(name) or _DEPTHS.fullmatch(name)) and value >= 2:
        return DimensionSpec(choice=[value // 2, value, value * 2])
    return None


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def refuse_unreported(search: ResolvedSearch, reported: Sequence[str]) -> None:
    """Refuse a search for a metric that the task's evaluations do not report, with those that they do."""
    missing = [metric for metric in search.spec.metrics if metric not in reported]
    if missing:
        meant = nearest(missing[0], list(reported))
        hint = f"Did you mean {meant[0]}?" if meant else f"Evaluations report {', '.join(sorted(reported))}."
        said = in_brackets(search.origins.get("metric", ""))
        raise JobFileError(search.source, [Problem("metric", f"the task reports no {missing[0]}{said}", hint)])
