"""From a search file or a call to a checked search with its job: read, layer, check, and tell every mistake at once."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quorate.core.errors import JobFileError, Problem
from quorate.spec.keys import AUTO_BATCH, usual_mode
from quorate.spec.load import (
    checked,
    load_job,
    load_recorded,
    name_from,
    read_job_file,
    resolve_layers,
    with_runs_placed,
)
from quorate.spec.override import Layers, Override, environment_overrides, plain_copy, present_name, renamed
from quorate.spec.problems import in_brackets, validated
from quorate.spec.resolved import ResolvedJob, dump_lines
from quorate.tune.rules import broken_search_rules, space_problems
from quorate.tune.spec import DimensionSpec, SearchSpec, dimension_problems

log = logging.getLogger(__name__)

SEARCH_FILE, JOB_FILE = "search.yaml", "job.yaml"
USUAL_TRIALS = 16
"""Of a search that is made from a job file alone."""
_HEADER = "# The search as it was resolved: every key, with where its value came from. Its job is next to it."


@dataclass(frozen=True)
class ResolvedSearch:
    """A valid search, the job that its trials have in common, the origin of each of its values, and where it was read.

    The job has the workers of a trial, runs on the machine that the trial is on, and watches the metric of the search
    if it names none.
    """

    spec: SearchSpec
    job: ResolvedJob
    origins: dict[str, str]
    source: str

    def trial_job(self, params: Mapping[str, Any], trial: int, manner: Mapping[str, Any] | None = None) -> ResolvedJob:
        """The job of a trial with these params; `manner` are keys that say where and how it runs."""
        return trial_job(self.job, params, trial, self.source, manner)


def trial_job(
    base: ResolvedJob,
    params: Mapping[str, Any],
    trial: int,
    source: str = SEARCH_FILE,
    manner: Mapping[str, Any] | None = None,
) -> ResolvedJob:
    """A job with params (by dotted key) over it; refused where the values do not go together."""
    name = Path(source).name
    overrides = [Override(key, value, f"{name}: space.{key}, trial {trial}") for key, value in params.items()]
    overrides += [Override(key, value, f"{name}: trial {trial}") for key, value in (manner or {}).items()]
    return _over(base, overrides)


def _over(base: ResolvedJob, overrides: Sequence[Override]) -> ResolvedJob:
    return resolve_layers(Layers(base.spec.model_dump(), base.origins), base.source, {}, overrides)


def read_search(path: Path, environment: Mapping[str, str], overrides: Sequence[Override] = ()) -> "SearchReading":
    """The search of a file. A job file will do as well: then all but the job is left open, and its space is proposed.

    Overrides are of keys of the search; those of `job.` go over the job, as variables of the environment do.
    """
    document = read_job_file(path)
    values, origins = dict(document.value), {key: f"{path.name} line {p.line}" for key, p in document.places.items()}
    if "task" in values and "job" not in values and "space" not in values:
        origins = {"job": str(path), "budget.trials": "default", "name": "default"}
        values = {"job": path.name, "budget": {"trials": USUAL_TRIALS}}
    named = {} if values.get("job") == path.name or path.stem == "search" else {"name": name_from(path, "search")}
    layers = with_runs_placed(Layers({**named, **values}, origins), path).under(_runs_of(environment))
    inside: dict[str, list[Override]] = {"job": [], "space": [], "": []}
    for override in overrides:
        section, _, key = override.key.partition(".")
        if key and section in ("job", "space"):
            inside[section].append(replace(override, key=key))
        else:
            inside[""].append(override)
    layers = _with_flat_space(layers.under(inside[""]), inside["space"])
    return SearchReading(layers, str(path), path.parent, environment, document.problems, over_job=inside["job"])


def read_mapping(
    mapping: Mapping[str, Any], source: str, environment: Mapping[str, str], job: ResolvedJob | None = None
) -> "SearchReading":
    """The search that a mapping describes, as if it stood in a file of the working folder; `job` if it is at hand."""
    layers = Layers(plain_copy(mapping), {str(key): source for key in mapping}).under(_runs_of(environment))
    return SearchReading(_with_flat_space(layers), source, Path.cwd(), environment, job=job)


def load_recorded_search(folder: Path) -> ResolvedSearch:
    """The search in its own folder, as `dump_search` and `dump_job` wrote it."""
    file = folder / SEARCH_FILE
    document = read_job_file(file, recorded=True)
    origins = {key: place.comment for key, place in document.places.items()}
    layers = _with_flat_space(Layers(document.value, origins), is_recorded=True)
    job = load_recorded(folder / JOB_FILE, {}, [])
    return replace(SearchReading(layers, str(file), folder, {}, document.problems, job).accepted(), origins=origins)


def dump_search(resolved: ResolvedSearch) -> str:
    """YAML with every key, its origin behind it; `load_recorded_search` reads it back equal, beside the job."""
    values, origins = resolved.spec.model_dump() | {"job": JOB_FILE}, dict(resolved.origins)
    if resolved.spec.space is not None:
        values["space"] = {key: each.model_dump(exclude_none=True) for key, each in resolved.spec.space.items()}
        for key, written in values["space"].items():
            for inner in written:
                origins.setdefault(f"space.{key}.{inner}", resolved.origins.get(f"space.{key}", ""))
    return "\n".join([_HEADER, *dump_lines(values, origins), ""])


def _runs_of(environment: Mapping[str, str]) -> list[Override]:
    """The one variable that is of the search as well: `--resume` and `show` look for it there."""
    return [override for override in environment_overrides(environment)[0] if override.key == "runs"]


def _with_flat_space(layers: Layers, overrides: Sequence[Override] = (), *, is_recorded: bool = False) -> Layers:
    """With the space by dotted keys of the job, by the names that these have in this version. Overrides are of the
    space: of one of its keys, or of what stands there, such as `params.width.choice`."""
    space = layers.values.get("space")
    if space is not None and not isinstance(space, Mapping):
        return layers
    flat, origins = _flat(space or {}), dict(layers.origins)
    for override in overrides:
        key, _, inner = override.key.rpartition(".")
        before, value = flat.get(key, {}), plain_copy(override.value)
        if inner in DimensionSpec.model_fields and isinstance(before, Mapping) and not isinstance(value, Mapping):
            flat[key] = {**before, inner: value}
            origins[f"space.{key}.{inner}"] = override.origin
            continue
        for key, given in _flat({override.key: value}).items():
            flat[key] = given
            origins = {other: said for other, said in origins.items() if not other.startswith(f"space.{key}.")}
            origins[f"space.{key}"] = override.origin
    present = renamed(flat)
    for old in flat.keys() - present.keys():
        if not is_recorded:
            log.warning("%s: the key is now called space.%s", layers.origin(f"space.{old}"), present_name(old))
        inside = {key.removeprefix("space."): said for key, said in origins.items() if key.startswith("space.")}
        origins |= {f"space.{present_name(key)}": said for key, said in inside.items()}
    return Layers({**layers.values, "space": present}, origins) if present or space is not None else layers


def _flat(space: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted key: a mapping with a mapping in it is a section of the job, unless it says which values there are."""
    flat = {}
    for key, value in space.items():
        is_section = isinstance(value, Mapping) and not value.keys() & DimensionSpec.model_fields.keys()
        if is_section and (key == "params" or any(isinstance(inner, Mapping) for inner in value.values())):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class SearchReading:
    """A search while it is read: the parts that are right, and what is wrong with the others.

    `problems` has more to come from whoever can check more, such as the params of the task.
    """

    def __init__(
        self,
        layers: Layers,
        source: str,
        folder: Path,
        environment: Mapping[str, str],
        problems: Sequence[Problem] = (),
        job: ResolvedJob | None = None,
        over_job: Sequence[Override] = (),
    ) -> None:
        self.source = source
        self.problems = list(problems)
        self._layers = replace(layers, values=dict(layers.values))
        self._job_problems: list[Problem] = []
        self.job = job or self._read_job(folder, environment, over_job)
        if self.job is not None:
            self._fill_in(self.job)
        values, origin = self._layers.values, self._layers.origin
        given = values.get("space")
        space = self._right_dimensions(given)
        self.spec, problems, doubtful = checked(SearchSpec, {**values, "space": space}, origin, {})
        if isinstance(given, Mapping) and len(space or ()) < len(given):
            doubtful.add("space")
        self.problems += problems
        if self.job is not None:
            self.job = self._common_job(self.job, doubtful)
        self.problems += broken_search_rules(self.spec, self.job, doubtful, self._layers.said)
        if self.job is not None:
            self.problems += space_problems(self.spec, self.job, doubtful, origin)
        self.problems += self._job_problems

    def accepted(self) -> ResolvedSearch:
        """Raises all that is wrong."""
        if self.problems or self.job is None:
            raise JobFileError(self.source, self.problems)
        origins = self._layers.origins_of(self.spec.model_dump())
        origins["job"] = self.job.source
        for key in self.spec.space or {}:
            origins[f"space.{key}"] = self._layers.origin(f"space.{key}")
        return ResolvedSearch(self.spec, self.job, origins, self.source)

    def origin(self, key: str) -> str:
        """Where a key of the search was written."""
        return self._layers.origin(key)

    def _read_job(
        self, folder: Path, environment: Mapping[str, str], overrides: Sequence[Override]
    ) -> ResolvedJob | None:
        given = self._layers.values.get("job")
        if given is None or not isinstance(given, str | dict) or not given:
            hint = "Write job: job.yaml (the path of a job file), or the keys of the job under it."
            if not isinstance(given, bool | int | float | list):
                self.problems.append(Problem("job", "there is no job to search for", hint))
                self._layers.values.pop("job", None)  # told once
            return None
        try:
            if isinstance(given, str):
                return load_job(folder / Path(given).expanduser(), environment, overrides)
            origins = {key.removeprefix("job."): said for key, said in self._layers.origins.items()}
            inline = Layers({"name": self._layers.values.get("name", "job"), **given}, origins)
            return resolve_layers(inline, self.source, environment, overrides, job_folder=folder)
        except JobFileError as error:
            where = "job." if isinstance(given, dict) else f"{Path(given).name}: "
            self._job_problems = [replace(problem, path=f"{where}{problem.path}") for problem in error.problems]
            return None

    def _fill_in(self, job: ResolvedJob) -> None:
        """What the search does not say, and the job does: its name, what is watched, and whether that is to be small or
        large."""
        values, origins = self._layers.values, self._layers.origins
        values.setdefault("name", f"{job.spec.name[:90]}-search")
        known: dict[Any, tuple[str, str]] = {"loss": ("min", "default")}
        for section in ("early_stop", "evaluate"):
            rule = getattr(job.spec, section)
            if rule is not None and rule.metric is not None:
                known[rule.metric] = (rule.mode, f"{section} of {Path(job.source).name}")
        if "metric" not in values:
            values["metric"], (_, origins["metric"]) = list(known.items())[-1]
        if values.get("mode") is None:
            names = values["metric"] if isinstance(values["metric"], list) else [values["metric"]]
            told = [known.get(name) if isinstance(name, str) else None for name in names]
            modes = [usual_mode(name) if said is None else said[0] for name, said in zip(names, told, strict=True)]
            if modes and None not in modes:
                values["mode"] = modes if isinstance(values["metric"], list) else modes[0]
                origins["mode"] = told[0][1] if told[0] is not None else "default"

    def _right_dimensions(self, space: Any) -> Any:
        """The keys of the space that are right by themselves, None where none is. What is no mapping stays as it is."""
        if not isinstance(space, Mapping):
            return space
        if not space:
            hint = "Name keys of the job, or leave space out: one is proposed."
            self.problems.append(Problem("space", f"it is empty{self._layers.said('space')}", hint))
        right = {}
        for key, given in space.items():
            path, said = f"space.{key}", self._layers.origin(f"space.{key}")
            if isinstance(given, Mapping):
                dimension, problems = validated(DimensionSpec, given, self._layers.origin, path)
                if dimension is not None and not problems:
                    problems = list(dimension_problems(path, dimension, said))
            else:
                text = f"it does not say which values there are{in_brackets(said)}"
                hint = "Write {choice: [1, 2]}, or {uniform: [0, 1]}; a fixed value belongs into the job."
                problems = [Problem(path, text, hint)]
            self.problems += problems
            if not problems:
                right[key] = given
        return right or None

    def _common_job(self, job: ResolvedJob, doubtful: set[str]) -> ResolvedJob:
        """The job with what the search says for all trials."""
        spec, name = self.spec, Path(self.source).name
        workers = spec.trial.workers or (1 if job.spec.workers == "auto" else job.spec.workers)
        said = job.origins["workers"] if spec.trial.workers is None else self._layers.origin("trial.workers")
        overrides = [Override("workers", workers, said), Override("engine", "local", name)]
        # What the job watches stays: a schedule of the task may react to it.
        if job.spec.evaluate.metric is None and "metric" not in doubtful and "mode" not in doubtful:
            overrides.append(Override("evaluate.metric", spec.metrics[0], f"{name}: metric"))
            overrides.append(Override("evaluate.mode", spec.modes[0], f"{name}: mode"))
        if job.spec.batch_size == AUTO_BATCH:
            text = f"every trial would look for a batch size of its own{in_brackets(job.origins['batch_size'])}"
            self._job_problems.append(Problem("batch_size", text, "Write a number: `quorate plan` says what fits."))
        try:
            return _over(job, overrides)
        except JobFileError as error:
            self._job_problems += [replace(one, path=f"trial.{one.path}") for one in error.problems]
            return job
