"""What a worker begins from: a checkpoint. Whether the run still reads the data that it has read until then, and is
computed by the same device."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.selection import Foreign, search_own, why_foreign
from quorate.checkpoint.store import CheckpointFolder, Loaded
from quorate.core.errors import CheckpointError, LinkError, RunError
from quorate.data.fingerprint import LAYOUT, SAMPLES
from quorate.spec.job import JobSpec
from quorate.task.progress import Progress
from quorate.worker.assembly import SessionParts
from quorate.worker.assignment import Assignment

# A fingerprint of which a sample is missing says which, and cannot be compared with a whole one.
_WHOLE = re.compile(r"[0-9a-f]+")
# What else a worker tells that says nothing about the machine and its libraries.
_OF_THE_TASK = ("task source", "layout")


def restore(assignment: Assignment, spec: JobSpec, parts: SessionParts) -> tuple[Progress, list[str]]:
    """Take up the checkpoint that the assignment names; and what is to be told of what has changed since."""
    assert assignment.checkpoint is not None
    path, own, warnings = Path(assignment.checkpoint), assignment.stored.checkpoints, list[str]()
    folder = CheckpointFolder.at(path.parent, cipher=parts.folder.cipher)
    instead = partial(newest_instead, path, folder, own, partial(why_foreign, spec=spec))
    load = partial(folder.load, boxes=parts.layout.boxes)
    info, loaded = load_meant(path, folder, load, instead if assignment.is_replacement else None)
    is_branch = info.path.parent != own
    if assignment.mode.is_training:
        # Only now: no fact of the launcher tells what datasets() gives, or what computes here.
        then, now, of_shards = info.manifest.environment, parts.environment, bool(parts.samples.shards)
        run = assignment.stored.name
        of_data = check_same_data(run, then, now, of_shards=of_shards, is_branch=is_branch)
        warnings = [*([] if of_data is None else [of_data]), *([] if is_branch else device_changes(run, then, now))]
    progress = parts.layout.load(loaded.encoded)
    # A branch may have another patience, or none: what was an early stop before need not be one for it. It may
    # watch another metric, too, and has no checkpoint of what another run has evaluated. And it begins as its job says:
    # other batches, or another machine, may well fit.
    early_stop = spec.early_stop
    progress = replace(progress, early_stopped=early_stop is not None and progress.waited >= early_stop.patience)
    if is_branch:
        kept = () if assignment.mode.is_training else progress.micro_batches
        progress = replace(progress, best=None, lasting_best=None, micro_batches=kept)
    return progress, warnings


def load_meant(
    meant: Path,
    folder: CheckpointFolder,
    load: Callable[[CheckpointInfo], Loaded],
    instead: Callable[[], CheckpointInfo] | None,
) -> tuple[CheckpointInfo, Loaded]:
    """What a worker begins from: the checkpoint that was meant or, where that is gone, the one that `instead` finds."""
    while True:
        info = next((info for info in folder.list() if info.path == meant), None)
        if info is None and instead is not None:
            info = instead()
        if info is None:
            raise CheckpointError(
                f"checkpoint {meant} is no longer there: it was removed while this job was starting. Try again; "
                "`checkpoint.keep` says how many a running job keeps"
            )
        try:
            return info, load(info)
        except CheckpointError:
            # Those who train may have removed it since it was listed. What is damaged is there still.
            if info.path.exists():
                raise


def newest_instead(gone: Path, folder: CheckpointFolder, own: Path, foreign: Foreign) -> CheckpointInfo:
    """Others have gone on and removed the checkpoint that was meant: what is newest now in the run's own is as good.

    Who finds none must not register as if there had never been one. It makes room for another, and the launcher looks
    again; if others hold the state by then, that one copies it.
    """
    newest = search_own(folder.search, foreign).newest if gone.parent == own else None
    if newest is None:
        raise LinkError(f"checkpoint {gone}, which this worker was to begin from, is no longer there")
    return newest


def check_same_data(
    run: str, recorded: Mapping[str, Any], present: Mapping[str, str], *, of_shards: bool, is_branch: bool
) -> str | None:
    """Refuse to go on with other data than those that a checkpoint was trained on. Where it may go on with others, what
    is to be told of them; a branch always may.

    What an earlier version has not recorded is not compared. Samples may be other numbers for another library or
    processor alone, which a run may go on with; how many there are and how shards lie in blocks may not.
    """
    has_other_layout = _differ(recorded, present, LAYOUT)
    # Before there was a layout, the index of shards was in the digest of their samples.
    is_comparable = LAYOUT in recorded or not of_shards
    if not has_other_layout and not (is_comparable and _differ(recorded, present, SAMPLES)):
        return None
    fact = LAYOUT if has_other_layout else SAMPLES
    values = _then_and_now(fact, str(recorded[fact]), present[fact])
    if is_branch:
        return f"the data are others than those that the checkpoint was trained on ({values})"
    if not has_other_layout and (others := _other_machine(recorded, present)):
        return (
            f"samples are other numbers than when run {run} was saved ({values}), maybe for {others}. Training "
            "continues; with the old versions the results would be the same."
        )
    raise RunError(
        f"the data have changed since run {run} was saved ({values}), so the run would no longer give the same "
        "results. "
        "Restore them (the files, the index of shards, and what datasets() gives: its length, columns=, window=), "
        "or start a new run from its checkpoint with --branch, which takes the data as they are: also where only "
        "their place is another, and samples hold it, such as the path of a file."
    )


def _other_machine(recorded: Mapping[str, Any], present: Mapping[str, str]) -> str:
    """The libraries and properties of the machine that are others than they were."""
    machine = [name for name in present if name not in (LAYOUT, SAMPLES, *_OF_THE_TASK)]
    others = [name for name in machine if recorded.get(name, present[name]) != present[name]]
    return "; ".join(f"{name}: {recorded[name]} then, {present[name]} now" for name in others)


def _then_and_now(fact: str, then: str, now: str) -> str:
    """Both values; where they say the same of numbers, it is what the files hold."""
    words = now.partition(" ")[2]
    if words and words == then.partition(" ")[2]:
        digests = (value.partition(" ")[0] for value in (then, now))
        return "{} {} then, {} now: {} as before, but the files hold something else".format(
            fact, *digests, words.strip("()")
        )
    return f"{fact} {then} then, {now} now"


def _differ(recorded: Mapping[str, Any], present: Mapping[str, str], fact: str) -> bool:
    then, now = str(recorded.get(fact, "")), present[fact]
    if fact == LAYOUT:  # what it is in words is not compared: an earlier version had none
        then, now = (value.partition(" ")[0] for value in (then, now))
    return then != now and all(_WHOLE.fullmatch(value) for value in (then, now))


# The launcher compares the rest. It has not spoken to the GPU's driver, and has compiled nothing.
_KNOWN_BY_WORKERS = ("precision", "gpu", "gpu capability", "cuda", "cudnn", "attention", "compiled")


def device_changes(run: str, recorded: Mapping[str, Any], present: Mapping[str, str]) -> list[str]:
    """What is to be told of a device that computes otherwise than when a checkpoint was saved, such as one whose trial
    of compiling has come out otherwise. What an earlier version, or another kind of device, has not recorded is not
    compared."""
    both = [name for name in _KNOWN_BY_WORKERS if name in recorded and name in present]
    return [
        f"{name} was {recorded[name]} when run {run} was saved and is {present[name]} now: the bits may differ"
        for name in both
        if str(recorded[name]) != present[name]
    ]
