"""Where the task of a run is found: where the job says, where the project was moved to, or in the run itself."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quorate.api.remains import near
from quorate.core.errors import RunError
from quorate.core.task_source import KIND, MOST_KEPT, TaskSource
from quorate.engines.messages import SOURCE
from quorate.engines.nursery_process import Prepared
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

    def load(self, seed: int) -> type[Any]:
        """Import it here, in this process."""
        from quorate.training.source import load_task_type

        if self.kept is not None:
            sys.path.insert(0, str(self.kept.folder))
            # Modules of the same names may be there, of another run or of the project as it is now.
            for name in self.kept.source.files:
                module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                if getattr(sys.modules.get(module), "__file__", None) != str(self.kept.folder / name):
                    sys.modules.pop(module, None)
        return load_task_type(self.reference, seed)


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
    if _is_there(reference):
        return TaskPlace(recorded)
    kept = read_source(run.path)
    moved, why = _moved(run, reference, kept)
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
    if not file.is_file():
        return None, ""
    files = files_of(file.stem, file, [str(file.parent), *sys.path])
    try:
        present = TaskSource(file.name, {name: path.read_bytes() for name, path in files.items()})
    except OSError:
        return None, ""
    missing = kept.source.files.keys() - present.files.keys()  # imported by names that are computed
    known = TaskSource(kept.source.main, {name: kept.source.files[name] for name in kept.source.files.keys() - missing})
    if present.digest != known.digest:
        return None, f", and {near(file)} has other code"
    return file, ""


def _from_kept(kept: KeptSource, reference: TaskReference) -> TaskPlace:
    place = TaskPlace(str(replace(reference, file=kept.folder / kept.source.main)), kept)
    if reference.module is not None:
        place = TaskPlace(str(reference), kept)
    return replace(place, search_path=[str(kept.folder), *place.search_path])
