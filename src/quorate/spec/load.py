"""From a job file, a recorded job or a call to a checked job: read, layer, check, and tell every mistake at once."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.core.errors import JobFileError, Problem, RequestError
from quorate.core.regular_file import read_regular
from quorate.core.runs_folder import USUAL_RUNS, is_run, runs_of_job
from quorate.spec.job import JobSpec, TaskReference
from quorate.spec.keys import AUTO, keys_of, nearest_file
from quorate.spec.options import SectionType
from quorate.spec.override import (
    ENVIRONMENT,
    Layers,
    Override,
    advice_on_names,
    environment_overrides,
    migrate,
    mixed_names,
    plain_copy,
    present_name,
    renamed,
    without_removed,
)
from quorate.spec.problems import Origin, misspelt, validated
from quorate.spec.resolved import ResolvedJob, job_gone
from quorate.spec.rules import broken_rules
from quorate.spec.yaml_document import Document, read_yaml

log = logging.getLogger(__name__)

SHOWN = 10
RECORDED = "recorded"
_NEEDED = {"task": "any.py:Any", "batch_size": AUTO}
"""Of a job, so that the other keys can be judged where these are wrong."""
Taken = Callable[[dict[str, Any]], dict[str, Any]]


def load_job(path: Path, environment: Mapping[str, str], overrides: Sequence[Override]) -> ResolvedJob:
    """The job of a file, with the environment over it and the overrides over that."""
    document = read_job_file(path)
    if "task" not in document.value and {"job", "space"} & document.value.keys():
        raise RequestError(f"{path} is a search, not a job. To run it: quorate tune {path}")
    origins = {key: f"{path.name} line {place.line}" for key, place in document.places.items()}
    layers = with_runs_placed(Layers({"name": name_from(path, "job"), **document.value}, origins), path)
    return resolve_layers(layers, str(path), environment, overrides, document.problems, job_folder=path.parent)


def name_from(path: Path, otherwise: str) -> str:
    """What something is called whose file does not say it: as the file is."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:100] or otherwise


def resolve_mapping(
    mapping: Mapping[str, Any], source: str, environment: Mapping[str, str], overrides: Sequence[Override]
) -> ResolvedJob:
    """The job that a mapping describes, as if it stood in a file; a task's file is relative to the working folder."""
    layers = Layers(plain_copy(mapping), {str(key): source for key in mapping})
    return resolve_layers(layers, source, environment, overrides)


def load_recorded(
    path: Path,
    environment: Mapping[str, str],
    overrides: Sequence[Override],
    taken: Taken = dict,
) -> ResolvedJob:
    """The job in a run folder, as `dump_job` wrote it. Its task may be gone since: an old run can still be shown.
    `taken` gives what is taken of its keys, under all that is asked for."""
    if not path.exists():
        raise job_gone(path)
    document = read_job_file(path, recorded=True)
    origins = {key: place.comment or RECORDED for key, place in document.places.items()}
    layers = _migrated(Layers(document.value, origins))
    values, removed = without_removed(taken(layers.values))
    resolved = resolve_layers(replace(layers, values=values), str(path), environment, overrides, document.problems)
    return replace(resolved, removed=removed)


def resolve_layers(
    layers: Layers,
    source: str,
    environment: Mapping[str, str],
    overrides: Sequence[Override],
    problems: Sequence[Problem] = (),
    job_folder: Path | None = None,
) -> ResolvedJob:
    """The job that layers describe, with the environment over them and the overrides over that.

    The files of the task and of a key are relative to the folder of the job file, and the task's has to be there;
    without a job file, to the working folder.
    """
    from_environment, unreadable = environment_overrides(environment)
    from_environment, overrides = (_with_present_names(layer) for layer in (from_environment, overrides))
    if mixed := list(mixed_names(layers.values, layers.origin)):
        problems = [*problems, *mixed]
    elif advice := advice_on_names(layers.values, source, layers.origin):
        log.warning("%s", advice)
    layers = _migrated(layers).under(from_environment).under(overrides)
    folder = job_folder or Path.cwd()
    spec, mistakes, doubtful = checked(JobSpec, layers.values, layers.origin, _NEEDED, folder)
    broken = broken_rules(spec, doubtful, layers.said)
    missing = [] if job_folder is None else _missing_task(layers, job_folder)
    found = [*problems, *unreadable, *mistakes, *broken, *missing]
    if found:
        # Whoever mistyped a flag must not look for it in the file.
        said = {_layer_of(problem, [*from_environment, *overrides]) or source for problem in found}
        raise JobFileError(said.pop() if len(said) == 1 else "the job", found)
    return ResolvedJob(spec, layers.origins_of(spec.model_dump()), source)


def _migrated(layers: Layers) -> Layers:
    values = migrate(layers.values)
    return layers if values == layers.values else Layers(values, renamed(layers.origins))


def _with_present_names(overrides: Sequence[Override]) -> Sequence[Override]:
    present = [replace(override, key=present_name(override.key)) for override in overrides]
    for before, now in zip(overrides, present, strict=True):
        if before != now:
            log.warning("%s: the key is now called %s", before.origin, now.key)
    return present


def _layer_of(problem: Problem, overrides: Sequence[Override]) -> str | None:
    if problem.path.startswith(ENVIRONMENT):
        return "the environment"
    keys = (problem.path, *problem.keys)
    # The last one has the last word; a mistake inside a section is the section's.
    for override in reversed(overrides):
        if any(f"{key}.".startswith(f"{override.key}.") or f"{override.key}.".startswith(f"{key}.") for key in keys):
            return override.layer
    return None


def checked(
    model: type[SectionType],
    values: Mapping[str, Any],
    origin: Origin,
    needed: Mapping[str, Any],
    folder: Path | None = None,
) -> tuple[SectionType, list[Problem], set[str]]:
    """A file as if nothing had been said of the keys that are in doubt, what is wrong with these, and their names.

    So a rule is judged although other keys are wrong, if its own are right: one reading tells everything. `needed`
    stands for keys without a default.
    """
    spec, problems = validated(model, values, origin, folder=folder)
    if spec is not None:
        return spec, problems, set()
    paths = [problem.path for problem in problems]
    doubtful = {path.partition(".")[0] for path in (*paths, *misspelt(paths, keys_of(model)))}
    sound = {key: value for key, value in values.items() if key in model.model_fields and key not in doubtful}
    return model.model_validate({**needed, **sound}), problems, doubtful


def _missing_task(layers: Layers, folder: Path) -> Iterator[Problem]:
    """Where the file of the task is not there. A malformed reference is told with the other keys."""
    with contextlib.suppress(KeyError, AttributeError, TypeError, ValueError):
        file = TaskReference.parse(layers.values["task"]).within(folder).file
        if file is not None and not file.is_file():
            meant = nearest_file(file.name, [sibling.name for sibling in file.parent.glob("*.py")])
            hint = f"Did you mean {meant[0]}?" if meant else "The file is looked for relative to the job file."
            yield Problem("task", f"there is no file {file} ({layers.origin('task')})", hint)


def with_runs_placed(layers: Layers, file: Path) -> Layers:
    """The folder of runs that a file names, relative to it; or the one where its runs are, if it names none."""
    given, folder = layers.values.get("runs"), file.parent
    if not file.is_file() or ("runs" in layers.values and not (isinstance(given, str) and given)):
        return layers  # a pipe is nowhere; what is no folder is told with the other keys
    if is_run(folder):  # a recorded job is trained again beside its run, wherever that was started
        beside = folder.absolute().parent
        runs = USUAL_RUNS if beside == USUAL_RUNS.absolute() else beside
    else:
        runs = runs_of_job(folder) if given is None else Path(given)
        if given is not None and folder.resolve() != Path.cwd():
            runs = folder.absolute() / runs
    if given is None and runs == USUAL_RUNS:
        return layers
    return replace(layers, values={**layers.values, "runs": str(runs)})


def read_job_file(path: Path, *, recorded: bool = False) -> Document:
    """The mapping in a file. Mistakes that leave a mapping to look at are kept in it; all others are raised."""
    document = read_yaml(_text_of(path, recorded))
    if isinstance(document.value, dict):
        return document
    kind = "a list" if isinstance(document.value, list) else f"the single value {document.value!r}"
    text = "it is empty" if document.value is None else f"it holds {kind} instead of a mapping of keys to values"
    needed = "A job needs at least task, batch_size, and epochs or steps."
    raise JobFileError(str(path), document.problems or [Problem("file", text, needed)])


def _text_of(path: Path, recorded: bool) -> str:
    if path.suffix == ".py":
        raise RequestError(_meant_by_script(path))
    try:
        # What a person names may be a pipe. What a run has recorded is a file: anything else is somebody's trap.
        return (read_regular(path) if recorded else path.read_bytes()).decode("utf-8-sig")
    except FileNotFoundError:
        near = nearest_file(path.name, _yaml_files(path.parent))
        hint = f" Did you mean {path.with_name(near[0])}?" if near else _job_files_in(path.parent)
        raise RequestError(f"there is no job file {path}.{hint}") from None
    except NotADirectoryError:
        raise RequestError(f"there is no job file {path}: a part of that path is a file, not a folder.") from None
    except IsADirectoryError:
        raise RequestError(f"{path} is a folder, not a job file.{_job_files_in(path)}") from None
    except UnicodeDecodeError as error:
        text = f"it is not UTF-8 text: the byte at offset {error.start} is {error.object[error.start]:#04x}"
        problem = Problem("file", text, "Is it a job file? If so, save it as UTF-8.")
        raise JobFileError(str(path), [problem]) from None
    except OSError as error:
        raise RequestError(f"the job file {path} cannot be read: {error.strerror}.") from None


def _meant_by_script(path: Path) -> str:
    """What to type where the file of a task was named: a job file that has it, or how to write one."""
    told = f"{path} is a Python file; what quorate trains is a job file that names a task in it"
    for name in _yaml_files(path.parent):
        file = path.with_name(name)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if re.search(rf"^task:\s*['\"]?(\./)?{re.escape(path.name)}:", file.read_text(), re.MULTILINE):
                return f"{told}. Did you mean: quorate train {file}"
    text = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = path.read_text()
    classes = re.findall(r"^class (\w+)\(.*Task\b.*\):", text, re.MULTILINE)
    loops = re.findall(r"^def (\w+)\(run\b", text, re.MULTILINE)  # training loops of one's own
    call = "quorate.launch()" if loops and not classes else "quorate.train()"
    return (
        f"{told}. Write one next to it, such as job.yaml with the lines `task: {path.name}:"
        f"{(*classes, *loops, 'MyTask')[0]}`, `batch_size: 32` and `epochs: 1`, and then: quorate train job.yaml. To "
        f"start it from its own code, call {call} there, and then: python {path}"
    )


def _job_files_in(folder: Path) -> str:
    if not folder.is_dir():
        return f" There is no folder {folder} either."
    names = _yaml_files(folder)
    place = "This folder" if folder == Path() else f"The folder {folder}"
    if not names:
        return f" {place} holds no *.yaml file; `quorate init` writes one."
    return f" {place} holds {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}."


def _yaml_files(folder: Path) -> list[str]:
    # Hidden ones are other tools' settings.
    found = (file.name for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern))
    return sorted(name for name in found if not name.startswith("."))
