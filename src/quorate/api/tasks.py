"""Where the task of a run is found: where the job says, where the project was moved to, or in the run itself.

It is imported into a person's own process without disturbing modules of the same names that may be there.
"""

import contextlib
import logging
import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from quorate.api.recorded_run import short_path
from quorate.core.errors import DamagedFileError, RunError
from quorate.core.runs_folder import is_run
from quorate.core.task_source import KIND, MOST_KEPT, TaskSource
from quorate.core.user_code import is_installed
from quorate.engines.engine import SOURCE, Prepared
from quorate.spec.job import TaskReference
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder, refuse_untrusted
from quorate.storage.task_files import KeptSource, files_of, is_own, keep_source, locate, read_source

log = logging.getLogger(__name__)
# `sys.path` and `sys.modules` are the process's: two loads at once would undo each other's changes.
_turn = threading.RLock()


@dataclass(frozen=True)
class TaskLocation:
    """What to load a task by. `kept` is set where that is the source that the run keeps."""

    reference: str
    kept: KeptSource | None = None
    search_path: list[str] = field(default_factory=lambda: [entry or str(Path.cwd()) for entry in sys.path])

    @contextlib.contextmanager
    def loaded(self, seed: int) -> Iterator[type[Any]]:
        """The task's class, imported in this process, for a `with` block in which something is built by it.

        Modules of the same names may be here, of another run or of the project as it is now: they are as before
        afterwards, and neither gets the other's. What code imports inside a function, it imports within the block.
        """
        from quorate.task.source import load_task_type

        file = TaskReference.parse(self.reference).file
        folder = self.kept.folder if self.kept is not None else None if file is None else file.parent
        if folder is None or not folder.is_dir():  # a module that is installed, or a mistake, told where it is loaded
            yield load_task_type(self.reference, seed)
            return
        with importing_from(folder, isolated=self.kept is not None):
            yield load_task_type(self.reference, seed)


def refuse_others_task(why: str, run: RunFolder) -> None:
    """Refuse to load the task of a run that may be others' (`why_untrusted`), unless the person names a task or trusts
    the job."""
    refuse_untrusted(why, run.path, "the task that its job names is not loaded. Name one with --task FILE:Class")


def find_task(run: RunFolder, recorded: str, asked: str | None = None, untrusted: str = "") -> TaskLocation:
    """Where the task of a run is, as recorded, unless a person asks for a place.

    A file that is gone is looked for where it lay relative to the run, as when a project was moved with its runs; there
    it counts only with the code that the run keeps, since another project may have a file of that name. Otherwise the
    source that the run keeps is the task. `untrusted` says of one that was not kept why.

    A task that others may have written into a job that was fetched counts only if it is of the project here.
    """
    if asked is not None:
        return TaskLocation(asked)
    try:
        reference = TaskReference.parse(recorded)
    except ValueError:
        return TaskLocation(recorded)  # told with both names where it is loaded
    kept = read_source(run.path)
    named = reference.file or f"module {reference.module}"
    is_there, moved, why = _looked_for(run, reference, kept, untrusted)
    if moved is not None:
        if not is_there:  # otherwise the project was copied with its runs
            log.warning("the task is no longer at %s: the one at %s is used", named, short_path(moved))
        return TaskLocation(f"{moved}:{reference.class_name}")
    if is_there:
        if why:
            log.warning("the task at %s is used, as recorded%s (--task FILE:Class names another)", named, why)
        return TaskLocation(recorded)
    if kept is None:
        return TaskLocation(recorded)
    log.warning(
        "the task %s is no longer there%s: the source that the run keeps is used (%s); --task FILE:Class names another",
        *(named, why, short_path(kept.folder)),
    )
    if reference.module is None:
        reference = replace(reference, file=kept.folder / kept.source.main)
    place = TaskLocation(str(reference), kept)
    return replace(place, search_path=[str(kept.folder), *place.search_path])


def with_task_at(resolved: ResolvedJob, place: TaskLocation) -> ResolvedJob:
    """The job with its task where that was moved to; a source that the run keeps is no place to be recorded."""
    if place.kept is not None or place.reference == resolved.spec.task:
        return resolved
    return replace(resolved, spec=resolved.spec.model_copy(update={"task": place.reference}))


def keep_task(run: RunFolder, task: str, source: TaskSource | None, place: TaskLocation) -> None:
    """Keep the source of a run's task in the run; not that of one that is installed, which is no project's."""
    if place.kept is not None and (fetched := RunFolder(place.kept.folder.parent).read_fetched()) is not None:
        run.write_fetched(fetched["from"], fetched["task"])  # a branch records the same task, which is not here
    if source is None:
        log.warning("the task's source is not kept in the run: it has more than %s bytes", f"{MOST_KEPT:,}")
        return
    loaded = TaskReference.parse(place.reference)
    file = loaded.file or locate(loaded.module or "")
    if place.kept is not None or (file is not None and is_own(file.resolve())):
        keep_source(run.path, source, TaskReference.parse(task).file)


def is_other_code(run: RunFolder, recorded: Mapping[str, Any], now: Prepared) -> bool:
    """Whether the task's code is another than the run began with, as far as that can be told."""
    digest = now.facts[SOURCE]
    if recorded.get(SOURCE, digest) == digest:
        return False
    # Another version of Python may read the same text into another tree.
    kept = read_source(run.path) if recorded.get("python") != now.facts.get("python") else None
    return kept is None or now.source is None or kept.source.files != now.source.files


def warn_of_other_code(run: RunFolder, recorded: Mapping[str, Any], place: TaskLocation) -> None:
    """Warn that a task is loaded whose code is another than the run began with, as far as that can be told."""
    then = str(recorded.get(SOURCE, ""))
    python = recorded.get("python", platform.python_version())
    # Another version of Python may read the same text into another tree.
    if not then.startswith(KIND) or python != platform.python_version():
        return
    kept = place.kept or read_source(run.path)
    file = None if place.kept is not None else TaskReference.parse(place.reference).file
    now, where = (None, run.path) if file is None else (_source_at(file), file)
    if kept is not None and (place.kept is not None or (now is not None and _is_same(now, kept.source))):
        now, where = kept.source, kept.folder
    if now is not None and now.digest != then:
        log.warning(
            "the task's code in %s is not what run %s began with (digest %s… then, %s… now); it is used all the same",
            *(short_path(where), run.name, then.removeprefix(KIND)[:12], now.digest.removeprefix(KIND)[:12]),
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
    message = f"the task's code has changed since run {run.name} began, so its results would differ. {remedy}"
    kept = read_source(run.path)
    if kept is None or now.source is None:
        since = now.facts[SOURCE]
        short = [digest.removeprefix(KIND)[:12] for digest in (then, since)]
        raise RunError(f"{message} Its digest was {short[0]}… then and is {short[1]}… now; the run keeps no source.")
    lines = kept.source.difference(now.source, (f"kept in {short_path(run.path)}", "now"))
    raise RunError("\n".join([f"{message} What differs:", *(f"  {line}" for line in lines)]))


def _looked_for(
    run: RunFolder, reference: TaskReference, kept: KeptSource | None, untrusted: str
) -> tuple[bool, Path | None, str]:
    """Whether a task is where its job says, where it was moved to, and why that does not count."""
    named = reference.file or f"module {reference.module}"
    file = reference.file or locate(reference.module or "")
    is_there = file is not None and (reference.file is None or file.is_file())
    moved, why = _moved(run, reference, kept)
    where = "is not here"
    if (others := _fetched_from(run, reference)) is not None:
        where = f"is named by a job from {others}, and is not of the project here" if is_there else where
        is_there = is_there and _is_of_project(file, reference.module, run, others)
        moved = moved if _is_of_project(moved, None, run, others) else None
    if not is_there and kept is None and (untrusted or others is not None):
        remedy = f", and {untrusted}; or name the task by" if untrusted else ". Name the task by"
        raise RunError(f"the task {named} {where}{remedy} --task FILE:Class.")
    return is_there, moved, why


def _fetched_from(run: RunFolder, task: TaskReference) -> str | None:
    """Where others may have written that this is the task of a run, if its job was fetched."""
    fetched = run.read_fetched()
    if fetched is None or not fetched["task"]:
        return None
    try:
        is_theirs = task.within(Path()) == TaskReference.parse(fetched["task"]).within(Path())
    except ValueError as error:
        raise DamagedFileError(f"{run.fetched_file} names no task: {error}") from None
    return fetched["from"] if is_theirs else None


def _is_of_project(file: Path | None, module: str | None, run: RunFolder, fetched_from: str) -> bool:
    """Whether a file is of the project in the working folder, or of an installed package; and lies in no run and in no
    copy of one, where whoever sends checkpoints might put it. Importing some of Python's own modules does things."""
    if file is None:
        return False
    here, file = Path(os.path.realpath(".")), Path(os.path.realpath(file))
    if not file.is_relative_to(here):
        return module is not None and is_installed(file) and module.partition(".")[0] not in sys.stdlib_module_names
    own, copy = (Path(os.path.realpath(place)) for place in (run.path, fetched_from))
    # A project may lie in the folder of runs; what lies where copies are sent may be of whoever sends them.
    around = [copy.parent, own if here.is_relative_to(own.parent) else own.parent]
    runs = (folder for folder in file.parents if folder.is_relative_to(here) and folder != here and is_run(folder))
    return not any(map(file.is_relative_to, (*around, *runs)))


def _moved(run: RunFolder, reference: TaskReference, kept: KeptSource | None) -> tuple[Path | None, str]:
    """The task's file where it lies relative to the run, as before; or why there is none."""
    if reference.file is None or kept is None or kept.found_at is None:
        return None, ""
    file = (run.path / kept.found_at).resolve()
    is_elsewhere = file.is_file() and file != reference.file.resolve()
    present = _source_at(file) if is_elsewhere else None
    if present is None:
        return None, ""
    if not _is_same(present, kept.source):
        return None, f", and {short_path(file)} has other code"
    return file, ""


def is_source_of(source: TaskSource, task: str) -> bool:
    """Whether this is the code of a task that is here."""
    try:
        reference = TaskReference.parse(task).within(Path.cwd())
    except ValueError:
        return False
    file = reference.file or locate(reference.module or "")
    present = None if file is None else _source_at(file)
    return present is not None and _is_same(present, source)


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


@contextlib.contextmanager
def importing_from(folder: Path, *, isolated: bool) -> Iterator[None]:
    """Around whatever imports or builds something of the code that lies in a folder.

    The folder comes first, and modules of other projects that have names of its own are out of the way; afterwards all
    is as it was. Modules of an `isolated` folder are never seen by anybody else; those of a person's project stay in
    `sys.modules` where they are in nobody's way, so that pickle finds them.
    """
    own = os.path.realpath(folder)
    with _turn:
        path, rivals = list(sys.path), _rivals(own)
        for name in rivals:
            del sys.modules[name]
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path[:] = path
            loaded = {name for name, module in list(sys.modules.items()) if _lies_in(own, module)}
            for name in loaded if isolated else loaded & rivals.keys():
                del sys.modules[name]
            sys.modules.update(rivals)


def _rivals(own: str) -> dict[str, ModuleType]:
    """Modules of other projects by the names that modules of a folder have."""
    names = {entry.name.removesuffix(".py") for entry in Path(own).iterdir()}
    found = {}
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        if top not in names or name == "__main__" or not isinstance(file, str) or _lies_in(own, module):
            continue
        is_here = Path(own, f"{top}.py").is_file() or Path(own, top, "__init__.py").is_file()
        # A project may have a random.py; whoever has imported Python's own goes on to use that.
        if is_here and is_own(Path(os.path.realpath(file))):
            found[name] = module
    return found


def _lies_in(own: str, module: ModuleType) -> bool:
    """Whether a module is a project's, below a folder."""
    file = getattr(module, "__file__", None)
    real = os.path.realpath(file) if isinstance(file, str) else ""
    return real.startswith(own + os.sep) and is_own(Path(real))
