"""How two runs differ: in what they were asked, in what their bits depend on, and from which step on."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quorate.core.errors import DamagedFileError
from quorate.core.task_source import TaskSource
from quorate.history.timeline import Timeline
from quorate.spec.load import load_recorded
from quorate.spec.resolved import Change, ResolvedJob, changes
from quorate.storage.kept_source import read_source
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

SOURCE_SHOWN = 40

Pair = tuple[Any, Any]
"""What the first run has, and what the second has; None for what one of them has not."""


@dataclass(frozen=True)
class Parting:
    """The first step that two runs have told differently: what of it differs, to the last bit."""

    step: int
    values: dict[str, Pair]


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
        """From a run's folder; a run that is still under way has no result yet."""
        kept = read_source(folder.path)
        return cls(
            folder,
            load_recorded(folder.job_file, {}, []),
            _whole(folder.read_environment),
            _whole(folder.read_result),
            Timeline.read(folder.events_file, keep=("losses", "gradient_norms")),
            None if kept is None else kept.source,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Those of its last evaluation."""
        evaluations = self.timeline.evaluations
        return evaluations[max(evaluations)] if evaluations else {}


@dataclass(frozen=True)
class RunPair:
    """Two runs side by side."""

    left: RunSide
    right: RunSide

    @classmethod
    def read(cls, left: RunFolder, right: RunFolder) -> "RunPair":
        """From two run folders."""
        return cls(RunSide.read(left), RunSide.read(right))

    @property
    def keys(self) -> tuple[Change, ...]:
        """The keys of the job file that differ."""
        return changes(self.left.job.spec, self.right.job.spec)

    @property
    def environment(self) -> dict[str, Pair]:
        """What differs of all that their bits depend on besides the job."""
        return differing(self.left.environment, self.right.environment)

    @property
    def source(self) -> list[str] | None:
        """A unified diff of the code of their tasks; None where not both have kept it."""
        if self.left.source is None or self.right.source is None:
            return None
        labels = (self.left.folder.name, self.right.folder.name)
        return self.left.source.difference(self.right.source, labels, SOURCE_SHOWN)

    @property
    def metrics(self) -> dict[str, Pair]:
        """The metrics of their last evaluations."""
        return side_by_side(self.left.metrics, self.right.metrics)

    @property
    def weights(self) -> Pair:
        """The digests of what they ended with, where they have ended."""
        return self.left.result.get("weights_digest") or None, self.right.result.get("weights_digest") or None

    @cached_property
    def comparison(self) -> "Comparison":
        """How far they went side by side."""
        return compare(self.left.timeline, self.right.timeline)


def _whole(read: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    try:
        return read() or {}
    except DamagedFileError as error:
        log.warning("%s", error)
        return {}


def compare(left: Timeline, right: Timeline) -> Comparison:
    """Compare two runs by loss and gradient norm, step by step: they depend on every bit of a step, and JSON writes the
    shortest text that reads back as the same number."""
    common = sorted(left.steps.keys() & right.steps.keys())
    for step in common:
        values = differing(*(side.steps[step].by_optimizer("loss", "gradient_norm") for side in (left, right)))
        if values:
            return Comparison(len(common), Parting(step, values))
    return Comparison(len(common), None)


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Pair]:
    """What differs between two mappings, in their order. A NaN equals itself, and 1 is not 1.0."""
    pairs = side_by_side(left, right)
    return {name: pair for name, pair in pairs.items() if json.dumps(pair[0]) != json.dumps(pair[1])}


def side_by_side(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Pair]:
    """Everything that either has, with both values."""
    return {name: (left.get(name), right.get(name)) for name in {**left, **right}}
