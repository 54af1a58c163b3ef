"""Known results: before a job is trained, the runs that are there are looked through for one that was this job.

A run counts only if its identity is equal and its data are proven. The launcher neither imports the task nor reads
data: what a job would be is found out by the process that prepares it, and only if some run asks the same of its task.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.api.recorded_run import newest_checkpoint
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import QuorateError
from quorate.core.regular_file import read_regular
from quorate.history.identity import Identity
from quorate.spec.job import JobSpec
from quorate.spec.meaning import LENGTH, meaning_of, params_of
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import IDENTITY

REUSED = "reused_from"
"""In a result: the run whose result it is or, up to the step where this one began, whose steps it has."""


class Known(Exception):  # noqa: N818 (no error: there is less to do)
    """A run was this job: all of it if it `is_complete`, or the first of its steps."""

    def __init__(self, run: RunFolder, identity: Identity, is_complete: bool, step: int) -> None:
        self.run, self.is_complete, self.step = run, is_complete, step
        same = f"job, code, versions, machine and data are the same (identity {identity.digest[:12]}…)"
        what = "its result is this job's" if is_complete else f"it is continued from step {step}"
        but = "" if is_complete else ", but for the number of steps"
        super().__init__(f"run {run.name} is known and {what}: {same}{but}. --fresh trains from the start")

    @property
    def fields(self) -> dict[str, Any]:
        """The result of a complete one."""
        return {**(self.run.whole_result() or {}), REUSED: self.run.name}

    def take_over(self, run: RunFolder) -> None:
        """Have in a run what the known one has trained and told, which it goes on from as if it were resumed."""
        for name in (run.events_file.name, IDENTITY):
            shutil.copyfile(self.run.path / name, run.path / name)
        shutil.copytree(self.run.checkpoints, run.checkpoints, copy_function=_link, dirs_exist_ok=True)

    def begin_in(self, run: RunFolder, spec: JobSpec) -> CheckpointInfo:
        """The same; the checkpoint from which it goes on."""
        self.take_over(run)
        return newest_checkpoint(run, spec, spec.checkpoint)


@dataclass(frozen=True)
class KnownRuns:
    """The runs that may have been a job, as far as its file says."""

    spec: JobSpec
    likely: tuple[tuple[Path, Identity], ...]

    @classmethod
    def of(cls, spec: JobSpec, runs: Path, *, is_usual: bool = False) -> "KnownRuns | None":
        """Those in a folder of runs and in the searches there; None if there are none or the job does not ask for them.
        `is_usual`: it does unless it says otherwise."""
        is_fixed = spec.strategy.fixes_bits and spec.deterministic and not spec.lineage
        if not (is_usual if spec.reuse is None else spec.reuse) or not is_fixed or spec.engine.is_cluster:
            return None
        wanted, params, name = _but_length(meaning_of(spec, 0)), params_of(spec.params), spec.task.rpartition(":")[2]
        likely = []
        for file in sorted([*runs.glob(f"*/{IDENTITY}"), *runs.glob(f"*/trials/*/{IDENTITY}")]):
            identity = None
            with contextlib.suppress(OSError, ValueError, RecursionError):
                identity = Identity.of_record(json.loads(read_regular(file)))
            if identity is None or not identity.is_proven or _but_length(identity.facts["job"]) != wanted:
                continue
            theirs = identity.facts["task"]
            if theirs["class"] == name and {**theirs["params"], **params} == theirs["params"]:
                likely.append((file.parent, identity))
        return cls(spec, tuple(likely)) if likely else None

    def find(self, prepared: Mapping[str, Any] | None) -> Known | None:
        """The best of those that were the job, by what the process that has prepared it says of it."""
        now = Identity.of_record(prepared)
        if now is None or not now.is_proven:
            return None
        others = {**now.facts, "job": {}}
        alike = [each for each in self.likely if {**each[1].facts, "job": {}} == others]
        found = []
        for path, identity in sorted(alike, key=lambda each: each[1].digest != now.digest):
            is_equal = identity.digest == now.digest
            if is_equal or (identity.any_length and identity.prefix == now.prefix and _is_shorter(identity, now)):
                known = self._known(RunFolder(path), now, is_equal)
                if known is not None and known.is_complete:
                    return known
                found += [known] if known is not None else []
        return max(found, key=lambda known: known.step, default=None)

    def _known(self, run: RunFolder, now: Identity, is_equal: bool) -> Known | None:
        # What memory has changed on the way is no fact of the job; nor is a run known that somebody is at work on.
        if run.stored is not None or run.holder() is not None or run.micro_batches_file.exists():
            return None
        saved: tuple[CheckpointInfo, ...] = ()
        with contextlib.suppress(QuorateError):
            saved = tuple(CheckpointFolder.at(run.checkpoints).list())
        step, result = saved[-1].cursor.step if saved else 0, run.whole_result() or {}
        if is_equal and saved and result.get("status") == "complete" and result.get("steps") == step:
            return Known(run, now, True, step)
        is_sealed = self.spec.checkpoint.sealing is not None or any(each.manifest.encryption for each in saved)
        return Known(run, now, False, step) if step and not is_sealed else None


def _but_length(job: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in job.items() if key not in LENGTH}


def _is_shorter(one: Identity, other: Identity) -> bool:
    """Whether one job ends before the other, in the unit that both count in."""
    lengths = [(one.facts["job"].get(unit), other.facts["job"].get(unit)) for unit in LENGTH]
    return any(less and more and less < more for less, more in lengths)


def _link(source: str, target: str) -> None:
    """A file of a checkpoint is never written again, so that two runs can have it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
