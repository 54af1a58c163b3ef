"""A search is opened: read, and checked against the task that it is of and the libraries that it needs."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from quorate.api.tasks import TaskLocation
from quorate.core.errors import JobFileError, Problem, QuorateError, RequestError
from quorate.core.installation import install_of
from quorate.spec.job import JobSpec
from quorate.spec.keys import nearest
from quorate.spec.override import Override
from quorate.spec.problems import Origin, in_brackets
from quorate.spec.search import PbtSpec, SearchSpec
from quorate.spec.search_load import ResolvedSearch, read_search

FORK = multiprocessing.get_context("fork")
Refused = Callable[[dict[str, Any]], list[Problem]]
"""What the task would refuse of its params."""


def open_search(
    path: Path,
    environment: Mapping[str, str],
    overrides: Sequence[Override] = (),
    meanwhile: Callable[[SearchSpec], None] | None = None,
) -> ResolvedSearch:
    """The search of a file, checked against its task.

    All mistakes are told at once, those in the params of the task among them. With `meanwhile` another process imports
    the task, and this one calls that at the same time.
    """
    reading = read_search(path, environment, overrides)
    if not reading.problems:
        refuse_missing_library(reading.spec)
    if reading.job is not None:
        ask = partial(_asked_task, reading.spec, reading.job.spec, reading.origin)
        try:
            reading.problems += ask() if meanwhile is None else _asked_by_another(ask, partial(meanwhile, reading.spec))
        except QuorateError:
            reading.accepted()  # other mistakes are told first
            raise
    return reading.accepted()


def check_task(search: ResolvedSearch) -> ResolvedSearch:
    """The same checks for a search that was made by a call."""
    refuse_missing_library(search.spec)
    if problems := _asked_task(search.spec, search.job.spec, lambda key: search.origins.get(key, "")):
        raise JobFileError(search.source, problems)
    return search


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
    """For its sampler, or here for its pruners; on Ray schedulers are Ray's own."""
    return spec.algorithm.kind == "optuna" or (spec.scheduler.kind != "none" and not spec.runs_on_ray)


def _asked_task(spec: SearchSpec, job: JobSpec, origin: Origin) -> list[Problem]:
    from quorate.training.task import params_problems

    with TaskLocation(job.task).loaded(job.seed) as task_type:
        problems = list(_refused_values(spec, job, origin, lambda params: params_problems(task_type, params)))
        if not problems and isinstance(spec.scheduler, PbtSpec):
            problems = list(_reshaping_values(spec, job, origin, task_type))
        return problems


def _asked_by_another(ask: Callable[[], list[Problem]], meanwhile: Callable[[], None]) -> list[Problem]:
    """By a fork, which takes torch and what the task imports with it when it ends."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_answer, args=(ask, sender), daemon=True)
    process.start()
    sender.close()
    meanwhile()
    try:
        answer: list[Problem] | QuorateError = receiver.recv()
    except EOFError:  # the task has ended its process: see here how
        answer = ask()
    process.join()
    if isinstance(answer, QuorateError):
        raise answer
    return answer


def _answer(ask: Callable[[], list[Problem]], sender: Connection) -> None:
    try:
        sender.send(ask())
    except QuorateError as error:
        sender.send(error)
    except KeyboardInterrupt:
        pass  # the terminal has sent it to both


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
        if any(each is not None and shapes[0] is not None and each != shapes[0] for each in shapes):
            text = (
                "it changes the shapes of the model's tensors, and with pbt a trial continues from the checkpoint of "
                f"another{in_brackets(origin(f'space.{key}'))}"
            )
            yield Problem(f"space.{key}", text, "Leave it out of the space, or use another scheduler.")


def _shapes(task_type: type[Any], params: dict[str, Any], seed: int) -> dict[str, tuple[int, ...]] | None:
    """Of all tensors of the task's model; None where it cannot be built without memory: then its trials tell."""
    import torch

    from quorate.data.streams import preserved_generators
    from quorate.training.task import configure

    try:
        with preserved_generators(), torch.device("meta"):
            model = configure(task_type, params, "space", seed).model()
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    except Exception:  # of the user's code, which may need numbers
        return None


def refuse_unreported(search: ResolvedSearch, reported: Sequence[str]) -> None:
    """Refuse a search for a metric that the task's evaluations do not report, with those that they do."""
    missing = [metric for metric in search.spec.metrics if metric not in reported]
    if missing:
        meant = nearest(missing[0], list(reported))
        hint = f"Did you mean {meant[0]}?" if meant else f"Evaluations report {', '.join(sorted(reported))}."
        said = in_brackets(search.origins.get("metric", ""))
        raise JobFileError(search.source, [Problem("metric", f"the task reports no {missing[0]}{said}", hint)])
