"""What the nodes of a cluster are given of a job's code: the folder of its task, Quorate itself, and packages.

Nodes have a copy of the folder, in which their processes stand. So what is a path below that folder here is one below
the working folder there.
"""

import contextlib
import filecmp
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import quorate
from quorate.core.errors import RequestError
from quorate.core.failure import Failure
from quorate.core.user_code import is_installed
from quorate.engines.engine import Preparation
from quorate.engines.ray.option import RaySpec, RuntimeEnvSpec
from quorate.spec.job import JobSpec, TaskReference
from quorate.storage.task_files import import_root, is_own, locate

STAYS = (".git", ".venv", "venv", "__pycache__", ".env", ".env.*")
"""What no node needs; `.env`, and `.env.production` and its like, have secrets in them."""
_JOB = re.compile(rb"^[\"']?task[\"']?\s*:", re.MULTILINE)
MOST_OF_A_JOB = 2**16
"""Bytes of a file that are looked at to tell whether it is a job."""
_ABSENT = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


@dataclass(frozen=True)
class NodeCode:
    """`root` is the folder that travels, without what `excludes` says, as .gitignore would; None: none does.

    `is_sent`: nodes get it without being told, since it came with the job that this process is.
    """

    root: Path | None = None
    excludes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    is_sent: bool = False

    def runtime_env(self, working_dir: str | None) -> dict[str, Any]:
        """By Ray's names. The folder is packed before: what Ray is told to exclude it excludes from modules as well."""
        given = {
            "working_dir": working_dir,
            "py_modules": list(self.modules),
            "excludes": ["__pycache__"] if self.modules else [],
            "pip": list(self.pip),
            "env_vars": dict(self.variables),
        }
        return {key: value for key, value in given.items() if value}


def node_code(spec: JobSpec, task: str, runs: Path, job_source: str) -> NodeCode:
    """What the nodes are given of a job's code. Runs stay here, and so does the job file, which may have secrets."""
    assert isinstance(spec.engine, RaySpec)
    asked = spec.engine.runtime_env
    if spec.engine.address == "local":  # the only node is this machine, where all is
        return NodeCode(modules=tuple(asked.py_modules), pip=tuple(asked.pip), variables=asked.env_vars)
    stays = [runs, *_said_job_file(job_source)]
    is_folder = spec.engine.storage is not None and spec.engine.object_store is None
    return code_of(task, asked, [*stays, *([Path(spec.engine.storage or "")] if is_folder else [])])


def _said_job_file(source: str) -> list[Path]:
    """The job file by where a job was said, such as ``job.yaml with --set``: a path may have that word in it, too."""
    words = source.split(" with ")
    paths = [Path(" with ".join(words[:count])) for count in range(1, len(words) + 1)]
    return [path for path in paths if path.is_file()]


def code_of(task: str, asked: RuntimeEnvSpec, stays: Sequence[Path]) -> NodeCode:
    """What travels for a task, by what its job says. What is named in `stays` does not, wherever it is."""
    root = _root_of(task, asked)
    excludes = [*STAYS, *asked.excludes]
    for place in stays:
        with contextlib.suppress(ValueError):
            inside = Path(os.path.realpath(place)).relative_to(os.path.realpath(root)) if root is not None else Path()
            if inside.parts:
                excludes.append(f"/{inside}")
    if root is not None:
        pruned = {*(str(place) for place in stays), *(pattern.strip("/") for pattern in excludes)}
        excludes += [f"/{file.relative_to(root)}" for file in _job_files(root, pruned)]
    modules = (str(Path(quorate.__file__).parent), *asked.py_modules)
    return NodeCode(root, tuple(excludes), modules, tuple(asked.pip), asked.env_vars)


def _job_files(root: Path, pruned: Collection[str]) -> Iterator[Path]:
    """Files that look like jobs: each may have secrets in it, and no node reads one. Folders that stay are `pruned`, by
    their names or paths: they may have a million files."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in pruned and str(Path(folder, name)) not in pruned]
        for file in (Path(folder, name) for name in files if name.endswith((".yaml", ".yml"))):
            with contextlib.suppress(OSError), file.open("rb") as opened:
                if _JOB.search(opened.read(MOST_OF_A_JOB)):
                    yield file


def _root_of(task: str, asked: RuntimeEnvSpec) -> Path | None:
    reference = TaskReference.parse(task)
    file = reference.file or locate(reference.module or "")
    if asked.working_dir is None:
        if file is None or not is_own(file.resolve()):
            return None  # installed on the nodes as well, or not at all, which its import tells
        return file.parent if reference.module is None else import_root(reference.module, file)
    root = Path(asked.working_dir)
    if not root.is_dir():
        raise RequestError(f"engine.runtime_env.working_dir: there is no folder {root} here.")
    if reference.file is not None and below(reference.file, root) is None:
        raise RequestError(
            f"engine.runtime_env.working_dir: the task's file {reference.file} is not below {root}, which is all that "
            "the nodes are given. Name a folder that holds both, or leave it out: then it is the task's own."
        )
    return root


def without_installed(preparation: Preparation) -> Preparation:
    """With the search path of a person's own folders only: nodes have packages of their own, from elsewhere."""
    own = [entry for entry in preparation.search_path if not is_installed(Path(entry, "any.py"))]
    return replace(preparation, search_path=[entry for entry in own if not entry.endswith(".zip")])


def moved(preparation: Preparation, here: Path, there: Path) -> Preparation:
    """The same where the folder `here` has its copy: on a node, `there`.

    A node that has the folder itself, with the same code, as by a disk that all share, computes in it: what a task
    reads beside its code may be there alone.
    """
    if _is_same_code(here, there):
        return preparation

    def place(path: str) -> str:
        inside = below(Path(path), here)
        return path if inside is None else str(there / inside)

    reference = TaskReference.parse(preparation.task)
    if reference.file is not None:
        reference = replace(reference, file=Path(place(str(reference.file))))
    return replace(preparation, task=str(reference), search_path=[place(entry) for entry in preparation.search_path])


class SentCode:
    """The copy of a folder of the launcher's machine that the nodes were sent, in which this process stands."""

    def __init__(self, sent: Path | None) -> None:
        self._sent = sent
        self._copy: Path | None = None
        try:
            self._copy = Path.cwd()
        except FileNotFoundError:
            # As Ray may leave it when several nodes share a machine, and so its folder of copies: they have the task
            # where it was written, if anywhere. What this process starts could not begin in a folder that is gone.
            os.chdir("/")

    def moved(self, preparation: Preparation) -> Preparation:
        """What is prepared, as it lies in the copy."""
        if self._sent is None or self._copy is None:
            return preparation
        return moved(preparation, self._sent, self._copy)


def with_remedy(failure: Failure, host: str) -> Failure:
    """A failed import with the line to add to the job, where a module is not on the nodes."""
    absent = _ABSENT.search(failure.message)
    if absent is None:
        return failure
    line = f"engine: {{runtime_env: {{{_entry_for(absent[1])}}}}}"
    told = (
        f"{failure.message.rstrip('.')}. It is not on host {host}; have the nodes get it by adding to the job: {line}"
    )
    return failure.at(message=told)


def _entry_for(module: str) -> str:
    """The entry of the runtime environment with which nodes get a module: as it is found here, or by its name."""
    top = module.partition(".")[0]
    file = locate(top)
    if file is not None and is_own(file):
        return f"py_modules: [{file.parent if file.name == '__init__.py' else file}]"
    package = next(iter(packages_distributions().get(top, ())), None)
    return f"pip: [{top}]" if package is None else f"pip: [{package}=={version(package)}]"


def _is_same_code(here: Path, there: Path) -> bool:
    files = list(there.rglob("*.py"))
    try:
        return bool(files) and all(filecmp.cmp(each, here / each.relative_to(there), shallow=False) for each in files)
    except OSError:  # it is not there, or may not be read
        return False


def below(path: Path, folder: Path) -> Path | None:
    """Where a path lies below a folder, by their names or by what these lead to."""
    for one, other in ((path.absolute(), folder.absolute()), (path.resolve(), folder.resolve())):
        with contextlib.suppress(ValueError):
            return one.relative_to(other)
    return None
