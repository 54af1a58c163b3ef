"""Where the task of a run is found: where the job says, where the project was moved to, or in the run itself."""

import contextlib
import logging
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quorate.api.own_imports import OwnImports
from quorate.api.remains import near
from quorate.core.errors import RunError
from quorate.core.task_source import KIND, MOST_KEPT, TaskSource
from quorate.engines.engine import SOURCE, Prepared
from quorate.spec.resolved import ResolvedJob
from quorate.spec.task_reference import TaskReference
from quorate.storage.kept_source import KeptSource, keep_source, read_source
from quorate.storage.project_files import files_of, is_own, locate
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskPlace:
    """What to load a task by. `kept` is set where that is the source that the run keeps."""

    reference: str
    kept: KeptSource | None = None
    search_path: list[str] = field(default_factory=lambda: [entry or str(Path.cwd()) for entry in sys.path])

    @contextlib.contextmanager
    def loaded(self, seed: int) -> Iterator[type[Any]]:
        """The task's class, imported in this process, for a `with` block in which something is built by it.

        Modules of the same names may be here, of another run or of the project as it is now: they are as before
        afterwards, and neither gets the other's, also when it imports them later.
        """
        from quorate.training.source import load_task_type

        file = TaskReference.parse(self.reference).file
        folder = self.kept.folder if self.kept is not None else None if file is None else file.parent
        if folder is None or not folder.is_dir():  # a module that is installed, or a mistake, told where it is loaded
            yield load_task_type(self.reference, seed)
            return
        imports = OwnImports(folder, isolated=self.kept is not None)
        with imports.active():
            yield load_task_type(self.reference, seed, imports.builtins)

    def load(self, seed: int) -> type[Any]:
        """The task's class."""
        with self.loaded(seed) as task_type:
            return task_type


def find_task(run: RunFolder, recorded: str, asked: str | None = None, untrusted: str = "") -> TaskPlace:
    """Where the task of a run is, as recorded, unless another place is asked for.

    A file that is gone is looked for where it lay relative to the run, as when a project was moved with its runs; there
    it counts only with the code that the run keeps, since another project may have a file of that name. Otherwise the
    source that the run keeps is the task. `untrusted` says of one that was not kept why.
    """
    if asked is not None and asked != recorded:
        return TaskPlace(asked)
    try:
        reference = TaskReference.parse(recorded)
    except ValueError:
        return TaskPlace(recorded)  # told with both names where it is loaded
    kept = read_source(run.path)
    moved, why = _moved(run, reference, kept)
    if _is_there(reference):
        return _of_two(reference, recorded, moved, why)
    if moved is not None:
        log.warning("the task is not at %s any more: the one at %s is used", reference.file, near(moved))
        return TaskPlace(f"{moved}:{reference.class_name}")
    if kept is None:
        if untrusted:
            raise RunError(
                f"the task {reference.file or f'module {reference.module}'} is not here, and {untrusted}; or name the "
                "task by --task FILE:Class."
            )
        return TaskPlace(recorded)
    log.warning(
        "the task %s is not there any more%s: the source that the run keeps is used (%s); --task FILE:Class names "
        "another",
        reference.file or f"module {reference.module}",
        why,
        near(kept.folder),
    )
    return _from_kept(kept, reference)


def _of_two(reference: TaskReference, recorded: str, moved: Path | None, why: str) -> TaskPlace:
    """The task where it is recorded; or, of a project that was copied with its runs, the copy of it."""
    if moved is not None and reference.file is not None and moved != reference.file.resolve():
        return TaskPlace(f"{moved}:{reference.class_name}")
    if why:
        log.warning("the task at %s is used, as recorded%s (--task FILE:Class names another)", reference.file, why)
    return TaskPlace(recorded)


def placed(resolved: ResolvedJob, place: TaskPlace) -> ResolvedJob:
    """The job with its task where that was moved to; a source that the run keeps is no place to be recorded."""
    if place.kept is not None or place.reference == resolved.spec.task:
        return resolved
    return replace(resolved, spec=resolved.spec.model_copy(update={"task": place.reference}))


def keep_task(run: RunFolder, task: str, source: TaskSource | None, place: TaskPlace | None = None) -> None:
    """Keep the source of a run's task in the run; not that of one that is installed, which is no project's."""
    if source is None:
        log.warning("the task's source is not kept in the run: it has more than %s bytes", f"{MOST_KEPT:,}")
        return
    reference = TaskReference.parse(task)
    file = reference.file or locate(reference.module or "")
    if (place is not None and place.kept is not None) or (file is not None and is_own(file.resolve())):
        keep_source(run.path, source, reference.file)


def is_other_code(run: RunFolder, recorded: Mapping[str, Any], now: Prepared) -> bool:
    """Whether the task's code is another than the run began with, as far as that can be told."""
    digest = now.facts[SOURCE]
    if recorded.get(SOURCE, digest) == digest:
        return False
    # Another version of Python may read the same text into another tree.
    kept = read_source(run.path) if recorded.get("python") != now.facts.get("python") else None
    return kept is None or now.source is None or kept.source.files != now.source.files


def warn_of_other_code(run: RunFolder, recorded: Mapping[str, Any], place: TaskPlace) -> None:
    """Warn that a task is loaded whose code is another than the run began with, as far as that can be told."""
    then = str(recorded.get(SOURCE, ""))
    python = recorded.get("python", platform.python_version())
    # Another version of Python may read the same text into another tree.
    if not then.startswith(KIND) or python != platform.python_version():
        return
    kept = read_source(run.path) if place.kept is None else place.kept
    now: TaskSource | None
    if place.kept is not None:
        now, where = place.kept.source, place.kept.folder
    else:
        file = TaskReference.parse(place.reference).file
        now, where = (None, run.path) if file is None else (_source_at(file), file)
        if now is not None and kept is not None and _is_same(now, kept.source):
            now, where = kept.source, kept.folder
    if now is not None and now.digest != then:
        log.warning(
            "the task's code in %s is not what run %s began with (digest %s… then, %s… now); it is used all the same",
            *(near(where), run.name, then.removeprefix(KIND)[:12], now.digest.removeprefix(KIND)[:12]),
        )


def refuse_other_code(run: RunFolder, recorded: Mapping[str, Any], now: Prepared, remedy: str) -> None:
    """Refuse code that differs from what a run began with, and show how; `remedy` says what to do."""
    if not is_other_code(run, recorded, now):
        return
    then = str(recorded[SOURCE])
    if not then.startswith(KIND):
        raise RunError(
            f"run {run.name} was begun by an earlier version of Quorate, which recorded the text of the task and not "
            f"its code (digest {then[:12]}…), so it cannot be known whether that is the same now. {remedy}"
        )
    told = f"the task's code has changed since run {run.name} began, so it would not produce what it promised. {remedy}"
    kept = read_source(run.path)
    if kept is None or now.source is None:
        since = now.facts[SOURCE]
        short = [digest.removeprefix(KIND)[:12] for digest in (then, since)]
        raise RunError(f"{told} Its digest was {short[0]}… then and is {short[1]}… now; the run keeps no source.")
    lines = kept.source.difference(now.source, (f"kept in {near(run.path)}", "now"))
    raise RunError("\n".join([f"{told} What differs:", *(f"  {line}" for line in lines)]))


def _is_there(reference: TaskReference) -> bool:
    return reference.file.is_file() if reference.file is not None else locate(reference.module or "") is not None


def _moved(run: RunFolder, reference: TaskReference, kept: KeptSource | None) -> tuple[Path | None, str]:
    """The task's file where it lies relative to the run, as before; or why there is none."""
    if reference.file is None or kept is None or kept.found_at is None:
        return None, ""
    file = (run.path / kept.found_at).resolve()
    if not file.is_file() or file == reference.file.resolve():
        return None, ""
    present = _source_at(file)
    if present is None:
        return None, ""
    if not _is_same(present, kept.source):
        return None, f", and {near(file)} has other code"
    return file, ""


def _source_at(file: Path) -> TaskSource | None:
    """A task's file and what it says that it imports of its project; None where it cannot be read."""
    files = files_of(file.stem, file, [str(file.parent), *sys.path])
    try:
        return TaskSource(file.name, {name: path.read_bytes() for name, path in files.items()})
    except OSError:
        return None


def _is_same(present: TaskSource, kept: TaskSource) -> bool:
    """Whether the code is the same, except for what is imported by names that are computed."""
    names = {kept.main, *(name for name in kept.files if name in present.files)}
    return present.digest == TaskSource(kept.main, {name: kept.files[name] for name in names}).digest


def _from_kept(kept: KeptSource, reference: TaskReference) -> TaskPlace:
    place = TaskPlace(str(replace(reference, file=kept.folder / kept.source.main)), kept)
    if reference.module is not None:
        place = TaskPlace(str(reference), kept)
    return replace(place, search_path=[str(kept.folder), *place.search_path])
