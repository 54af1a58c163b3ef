"""How two runs differ: in what they were asked, in what their bits depend on, and from which step on."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from quorate.core.errors import DamagedFileError
from quorate.core.task_source import TaskSource
from quorate.history.timeline import Timeline, logged_curves
from quorate.observe.events import StepCompleted
from quorate.spec.changes import Change, changes
from quorate.spec.load import load_recorded
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.storage.task_files import read_source

log = logging.getLogger(__name__)

SOURCE_SHOWN = 40
COMPARED = ("losses", "gradient_norms", "log", "lanes", "tensors", "samples", "samples_per_second")

Pair = tuple[Any, Any]
"""What the first run has, and what the second has; None for what one of them has not."""


@dataclass(frozen=True)
class Parting:
    """The first step that two runs have told differently: what of it differs, to the last bit. Where both have recorded
    their lanes, the first of these whose gradient differs and, of its tensors, the first that does."""

    step: int
    values: dict[str, Pair]
    lane: int | None = None
    tensor: str | None = None


@dataclass(frozen=True)
class Comparison:
    """How far two runs went side by side. Without a parting, all their common steps have the same bits."""

    common_steps: int
    parting: Parting | None


@dataclass(frozen=True)
class RunSide:
    """One of two runs: what it was asked, what its bits depend on, what it told and how it ended."""

    folder: RunFolder
    job: ResolvedJob
    environment: dict[str, Any]
    result: dict[str, Any]
    timeline: Timeline
    source: TaskSource | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> "RunSide":
        kept = read_source(folder.path)
        return cls(
            folder,
            load_recorded(folder.job_file, {}, []),
            _whole(folder.read_environment),
            _whole(folder.read_result),
            Timeline.read(folder.events_file, keep=COMPARED),
            None if kept is None else kept.source,
        )

    @property
    def logged(self) -> dict[str, float]:
        """The last number of each that its task has logged."""
        return {curve.name: curve.last for curve in logged_curves(self.timeline)}


@dataclass(frozen=True)
class RunPair:
    """Two runs side by side: which keys of the job file differ, and what of all else that their bits depend on; a
    unified diff of the code of their tasks, None where not both have kept it; the metrics of their last evaluations,
    the last numbers that their tasks logged, and the digests of what they ended with, where they have ended."""

    left: RunSide
    right: RunSide
    keys: tuple[Change, ...]
    environment: dict[str, Pair]
    source: list[str] | None
    metrics: dict[str, Pair]
    logged: dict[str, Pair]
    weights: Pair
    comparison: Comparison

    @classmethod
    def read(cls, left: RunFolder, right: RunFolder) -> "RunPair":
        one, other = RunSide.read(left), RunSide.read(right)
        source = None
        if one.source is not None and other.source is not None:
            source = one.source.difference(other.source, (left.name, right.name), SOURCE_SHOWN)
        return cls(
            left=one,
            right=other,
            keys=changes(one.job.spec, other.job.spec),
            environment=differing(one.environment, other.environment),
            source=source,
            metrics=side_by_side(one.timeline.metrics, other.timeline.metrics),
            logged=side_by_side(one.logged, other.logged),
            weights=(one.result.get("weights_digest") or None, other.result.get("weights_digest") or None),
            comparison=compare(one.timeline, other.timeline),
        )


def _whole(read: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    try:
        return read() or {}
    except DamagedFileError as error:
        log.warning("%s", error)
        return {}


def compare(left: Timeline, right: Timeline) -> Comparison:
    """Compare two runs by loss and gradient norm, step by step: they depend on every bit of a step, and JSON writes the
    shortest text that reads back as the same number. And by the digests of lanes, where both have recorded them."""
    common = sorted(left.steps.keys() & right.steps.keys())
    for step in common:
        one, other = left.steps[step], right.steps[step]
        values = differing(*(side.by_optimizer("loss", "gradient_norm") for side in (one, other)))
        lane = _first(one.lanes, other.lanes) if one.lanes and other.lanes else None
        if values or lane is not None:
            return Comparison(len(common), Parting(step, values, lane, _first_tensor(one, other, lane)))
    return Comparison(len(common), None)


def _first(left: Sequence[str], right: Sequence[str]) -> int | None:
    pairs = enumerate(zip_longest(left, right))
    return next((number for number, (one, other) in pairs if one != other), None)


def _first_tensor(left: StepCompleted, right: StepCompleted, lane: int | None) -> str | None:
    if lane is None or left.tensors is None or right.tensors is None:
        return None
    pairs = ((name, each[lane : lane + 1], right.tensors.get(name, ())) for name, each in left.tensors.items())
    return next((name for name, one, other in pairs if one != other[lane : lane + 1]), None)


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Pair]:
    """What differs between two mappings, in their order. A NaN equals itself, and 1 is not 1.0."""
    pairs = side_by_side(left, right)
    return {name: pair for name, pair in pairs.items() if json.dumps(pair[0]) != json.dumps(pair[1])}


def side_by_side(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Pair]:
    """Everything that either has, with both values."""
    return {name: (left.get(name), right.get(name)) for name in {**left, **right}}
