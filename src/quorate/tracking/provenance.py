"""Where a run comes from, for others to see: its job as flat parameters, who ran it where, and the state of its code.

The run folder keeps it, as it was when the job was launched: a tracker may be told of it much later, and elsewhere.
"""

import contextlib
import getpass
import json
import os
import socket
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quorate.core.machine import usable_cores
from quorate.core.masking import mask, shown_value
from quorate.spec.device import workers_here
from quorate.spec.job import JobSpec, TaskReference, mark_of
from quorate.spec.keys import Mark
from quorate.spec.yaml_document import write_value
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER

LONGEST_DIFF = 1_000_000
_FACTS, _COMMIT, _DIFF = "facts.json", "git.commit", "git.diff"
_PATIENCE = 20.0


@dataclass(frozen=True)
class GitState:
    """The commit that a project is at, and what was changed since; empty where there is no repository."""

    commit: str = ""
    diff: str = ""


def parameters_of(spec: JobSpec) -> dict[str, str]:
    """What a job means, by dotted keys, as a job file has it; keys that were not given are left out."""
    return {key: write_value(value) for key, value in _meaning(spec)}


def shown_parameters(spec: JobSpec) -> dict[str, str]:
    """The same for others to see: without secrets."""
    return {key: write_value(shown_value(key, value)) for key, value in _meaning(spec)}


def record(run: RunFolder, spec: JobSpec) -> None:
    """Keep in the run folder who runs the job now, and, for a run that begins, the state of its code."""
    folder = run.path / FOLDER
    with contextlib.suppress(OSError):  # a full disk: then it is not known
        write_atomically(folder / _FACTS, json.dumps(_facts(run, spec), indent=2) + "\n")
        if not (folder / _COMMIT).exists():
            git = git_state(spec)
            write_atomically(folder / _DIFF, mask(git.diff))
            write_atomically(folder / _COMMIT, f"{git.commit}\n")


def recorded_facts(run: RunFolder) -> dict[str, str]:
    """Who ran the job, where, and how; nothing where that was not kept."""
    try:
        facts = json.loads((run.path / FOLDER / _FACTS).read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in facts.items()} if isinstance(facts, dict) else {}


def recorded_git(run: RunFolder) -> GitState:
    """The state of the code when the run began."""
    folder = run.path / FOLDER
    try:
        commit = (folder / _COMMIT).read_text().strip()
        return GitState(commit, (folder / _DIFF).read_text() if commit else "")
    except (OSError, ValueError):
        return GitState()


def _facts(run: RunFolder, spec: JobSpec) -> dict[str, str]:
    return {
        "quorate.folder": str(run.path),
        "quorate.version": version("quorate"),
        "quorate.user": user_name(),
        "quorate.host": socket.gethostname(),
        "quorate.workers": str(workers_here(spec, usable_cores())),
        "quorate.strategy": spec.strategy.kind,
        "quorate.task": spec.task,
    }


def git_state(spec: JobSpec) -> GitState:
    """The state of the project that the task lies in. It never fails: code need not be in a repository."""
    file = TaskReference.parse(spec.task).file
    folder = Path.cwd() if file is None else file.parent
    commit = _git(folder, "rev-parse", "HEAD").strip()
    if not commit:
        return GitState()
    # No program that the repository names is run for it.
    diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    if len(diff) > LONGEST_DIFF:
        diff = f"{diff[:LONGEST_DIFF]}\n… cut off here: the whole has {len(diff):,} characters\n"
    return GitState(commit, diff)


def _git(folder: Path, *words: str) -> str:
    try:
        asked = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *words],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.decode(errors="replace") if asked.returncode == 0 else ""


def user_name() -> str:
    """Whoever has started this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in a container
        return str(os.getuid())


def _meaning(spec: JobSpec) -> list[tuple[str, Any]]:
    flat = _flat("", spec.model_dump())
    return [(k, v) for k, v in flat if v is not None and v != {} and mark_of(k) is Mark.MEANING]


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flat(f"{prefix}.{key}" if prefix else key, inner)]
    return [(prefix, value)]
