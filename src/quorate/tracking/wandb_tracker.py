"""Weights & Biases: one run of it for a run, with its files in the run folder."""

import itertools
import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quorate.history.curves import Point, StepSet
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.tracking.mlflow_client import identity
from quorate.tracking.provenance import recorded_facts, recorded_git, shown_parameters
from quorate.tracking.tracker import Tracker

FOLDER = "wandb"
_BLOCK, _HEADER = 1 << 15, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


class WandbTracker(Tracker):
    """Logs curves to W&B, offline or online. Its id is the same whenever a run is resumed: `wandb sync` makes one run.

    W&B does not tell when something is on the disk. So each process is given all of the run's file, and logs what is
    not in W&B's own files yet. W&B takes no step before its last one: a correction of one is not logged, and a look at
    the machine, which may be a step behind or ahead, stands at the last step that was logged before it.
    """

    key = "wandb"

    def __init__(self, run: RunFolder, spec: JobSpec, mode: str, every: int = 1) -> None:
        super().__init__(every)
        self.name = f"W&B ({mode})"
        self._run = run
        self._spec = spec
        self._mode = mode
        self._held: dict[str, StepSet] = {}
        self._step = 0
        self._wandb_run: Any = None

    def load(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb
        import wandb.proto.wandb_internal_pb2  # noqa: F401

    def begin(self) -> bool:
        self._held, self._step = {}, 0
        for name, step, _ in read_values(self._run.path / FOLDER):
            self._held.setdefault(name, StepSet()).add(step)
        return False

    def log(self, points: Sequence[Point]) -> int:
        # By what was given so far alone: where all is given again, each look has the same step again.
        logged, last, placed = 0, self._step, list[tuple[int, Point]]()
        for point in points:
            last = last if point.is_sample else max(last, point.step)
            placed.append((last if point.is_sample else point.step, point))
        for step, group in itertools.groupby(placed, lambda each: each[0]):
            row = {point.name: point.value for _, point in group if self._lacks(point, step)}
            if row:
                self._open().log(row, step=step)
            logged += len(row)
        self._step = last
        return logged

    def finish(self, status: str) -> None:
        if self._wandb_run is not None:
            import wandb

            self._wandb_run.summary["status"] = status
            self._wandb_run.finish(exit_code=0 if status == "complete" else 1)
            self._wandb_run = None
            # Its process writes the file to the end only when it ends itself.
            wandb.teardown()

    def _open(self) -> Any:
        """Not before there is something to log: each process that does adds a folder."""
        if self._wandb_run is None:
            self.load()
            import wandb

            facts, git = recorded_facts(self._run), recorded_git(self._run)
            self._wandb_run = wandb.init(
                project=self._spec.name,
                id=identity(self._run),
                name=self._run.name,
                dir=str(self._run.path),
                mode=self._mode,
                resume="allow" if self._mode == "online" else None,
                config={**shown_parameters(self._spec), **facts, **({"git.commit": git.commit} if git.commit else {})},
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_git=True,
                    save_code=False,
                    x_disable_stats=True,
                    x_disable_meta=True,
                ),
            )
        return self._wandb_run

    def _lacks(self, point: Point, step: int) -> bool:
        return not point.corrects and (point.name not in self._held or step not in self._held[point.name])


def read_values(folder: Path) -> Iterator[tuple[str, int, Any]]:
    """Names, steps and values of all that is in W&B's files: one for each process that has tracked the run."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("*run-*/run-*.wandb")):
        for content in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            step = int(json.loads(row["_step"])) if "_step" in row else record.history.step.num
            for name, value in row.items():
                if not name.startswith("_"):
                    yield name, step, json.loads(value)


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a file of W&B's: a header, and blocks as LevelDB writes its logs. What was cut off is left out."""
    at, parts = _HEADER, list[bytes]()
    while at + _HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        at += _HEADER
        if (not length and not kind) or at + length > len(content):
            return
        if kind in (_WHOLE, _FIRST):
            parts = []
        parts.append(content[at : at + length])
        at += length
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
