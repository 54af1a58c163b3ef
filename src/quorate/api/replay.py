"""Replaying one step of two runs from the checkpoints before it, to find the tensors in which they differ."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.api.evaluate import hold_checkpoint, run_in_scratch, scratch_folder
from quorate.api.recorded_run import recorded_environment, recorded_job
from quorate.api.tasks import find_task, refuse_other_code
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, RunError
from quorate.engines.engine import Prepared
from quorate.observe.events import RunBegan, StepCompleted
from quorate.observe.jsonl import EventTail
from quorate.storage.run_folder import RunFolder
from quorate.training.run_mode import RunMode


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in two states; `largest` is None where their shapes or types differ."""

    name: str
    shape: tuple[int, ...]
    elements: int
    differing: int
    largest: float | None


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    `moment` is "before" where the states differ already when the step begins, "after" where they do once it is done,
    and None where the replay has ended with equal states. `unfaithful` names the runs whose replay does not give
    what their events say: they ran with another processor, library or data than there is here.
    """

    step: int
    moment: str | None
    tensors: tuple[TensorDifference, ...]
    unfaithful: tuple[str, ...]


@dataclass(frozen=True)
class _Replayed:
    before: dict[str, Any]
    after: dict[str, Any]
    reported: dict[str, float | None]


def replay(
    runs: tuple[RunFolder, RunFolder], step: int, reported: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Replay:
    """Replay a step of two runs; `reported` is what the events of each say of it: loss and gradient norm."""
    with scratch_folder() as scratch:
        left, right = (_replayed(run, step, scratch / str(side)) for side, run in enumerate(runs))
        unfaithful = tuple(
            run.name
            for run, done, expected in zip(runs, (left, right), reported, strict=True)
            if any(done.reported.get(name) != value for name, value in expected.items())
        )
        for moment, pair in (("before", (left.before, right.before)), ("after", (left.after, right.after))):
            differences = tuple(_differences(*pair))
            if differences:
                return Replay(step, moment, differences, unfaithful)
    return Replay(step, None, (), unfaithful)


def _replayed(run: RunFolder, step: int, scratch: Path) -> _Replayed:
    resolved = recorded_job(run)
    if not resolved.spec.strategy.is_synchronous:
        mode = resolved.spec.model_dump()["strategy"]["mode"]
        raise RunError(
            f"run {run.name} cannot be replayed: with strategy.mode: {mode} its weights depend on who was when at "
            "work, and that does not come again. Only synchronous runs are replayed; `quorate show RUN --ledger` says "
            "what is promised of the others."
        )
    if not resolved.spec.strategy.fixes_bits:
        raise RunError(
            f"run {run.name} cannot be replayed: with strategy: {resolved.spec.strategy.kind} its last bits depend on "
            "how many workers there were at each step."
        )
    place = find_task(run, resolved.spec.task)

    def refuse(now: Prepared) -> None:
        try:
            refuse_other_code(run, recorded_environment(run, info), now, "Undo the change, and try again.")
        except RunError as error:
            raise RunError(f"run {run.name} cannot be replayed: {error.message}") from None

    info = _checkpoint_before(run, step)
    checkpoint = None if info is None else hold_checkpoint(run, info, scratch)
    mode, micro_batches = RunMode(replayed_step=step), run.read_micro_batches()
    done, _ = run_in_scratch(scratch, resolved, mode, checkpoint, refuse, place, micro_batches)
    folder = CheckpointFolder.at(done.checkpoints)
    states = {saved.cursor.step: folder.load(saved).state["replica"] for saved in folder.list()}
    events = EventTail(done.events_file).read_new()
    reported = next((event for event in events if isinstance(event, StepCompleted) and event.step == step), None)
    if reported is None or not {step - 1, step} <= states.keys():
        raise RunError(f"run {run.name} cannot be replayed: trained again here, it ends before step {step}")
    return _Replayed(states[step - 1], states[step], reported.by_optimizer("loss", "gradient_norm"))


def _checkpoint_before(run: RunFolder, step: int) -> CheckpointInfo | None:
    """The newest whole one before a step; without any, the replay begins where the job does."""
    folder = CheckpointFolder.at(run.checkpoints)
    for info in reversed(folder.list()):
        if info.cursor.step < step:
            with contextlib.suppress(CheckpointError):
                folder.verify(info)
                return info
    begin = 0
    with contextlib.suppress(RunError):
        begun = next((event for event in EventTail(run.events_file) if isinstance(event, RunBegan)), None)
        begin = 0 if begun is None else begun.from_step or 0
    if begin > 0:
        raise RunError(
            f"run {run.name} cannot be replayed: it is a branch that began at step {begin} from a checkpoint of "
            f"another run, and it has none of its own before step {step}. Keep more of them with `checkpoint.every` "
            "and `checkpoint.keep`"
        )
    return None


def _differences(left: dict[str, Any], right: dict[str, Any]) -> Iterator[TensorDifference]:
    import torch

    from quorate.training.device import same_bits

    first, second = dict(_tensors(left)), dict(_tensors(right))
    for name in {**first, **second}:
        tensor = first[name] if name in first else second[name]
        differing, largest = tensor.numel(), None
        if name in first and name in second:
            one, other = first[name], second[name]
            if same_bits(one, other):
                continue
            if one.shape == other.shape and one.dtype == other.dtype:
                raw = [each.contiguous().reshape(-1, 1).view(torch.uint8) for each in (one, other)]
                differing = int((raw[0] != raw[1]).any(dim=1).sum())
                largest = float((one.double() - other.double()).abs().max())
        yield TensorDifference(name, tuple(tensor.shape), tensor.numel(), differing, largest)


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a replica's state, the model's under their own names."""
    import torch

    if isinstance(value, torch.Tensor):
        yield path.removeprefix("tensors."), value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _tensors(inner, f"{path}.{key}" if path else str(key))
