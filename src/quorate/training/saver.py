"""Saving the state: every replica is compared, the worker that hosts lane 0 writes."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from quorate.checkpoint.store import CheckpointFolder
from quorate.core.digests import content_digest, first_difference
from quorate.core.errors import DivergedError
from quorate.observe.event import Event
from quorate.training.progress import Progress
from quorate.training.replica import Replica
from quorate.training.strategy import Strategy


class Saver:
    """Writes checkpoints of a state that all workers hold, and keeps the last `keep` of them; with None all."""

    def __init__(
        self,
        folder: CheckpointFolder,
        keep: int | None,
        job: dict[str, Any],
        environment: dict[str, str],
        *,
        publish: Callable[[Event], None],
        check_lease: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._job = job
        self._environment = environment
        self._publish = publish
        self._check_lease = check_lease
        self._saved: Progress | None = None
        self._written: Progress | None = None

    def has_written(self, progress: Progress) -> bool:
        """Whether this worker has committed a checkpoint of this."""
        return progress == self._written

    def save(self, replica: Replica, progress: Progress, strategy: Strategy) -> None:
        """Save this state, unless it is saved already."""
        if progress == self._saved:
            return
        check_equal(replica, progress, strategy)
        if 0 in strategy.hosted:
            self._write(replica, progress)
        self._saved = progress

    def _write(self, replica: Replica, progress: Progress) -> None:
        self._check_lease()
        cursor = progress.cursor
        saved = self._folder.save(
            {"replica": replica.state(), "progress": progress.to_dict()},
            step=cursor.step,
            phase=int(cursor.phase),
            weights_digest=replica.weights_digest(),
            job=self._job,
            environment=self._environment,
            metrics=progress.metrics,
            # Asked again before the commit: writing takes its time, and a lease may end in it.
            check=self._check_lease,
        )
        self._written = progress
        if self._keep is not None:
            best = None if progress.best is None else progress.best.step
            self._folder.prune(self._keep, best, check=self._check_lease)
        self._publish(
            Event(
                "checkpoint",
                cursor.step,
                {"path": str(saved.path), "bytes": saved.bytes, "seconds": round(saved.seconds, 4)},
            )
        )


def check_equal(replica: Replica, progress: Progress, strategy: Strategy) -> None:
    """Refuse to go on when replicas differ; name the first tensor that does, and who holds which."""
    step = progress.cursor.step
    own = replica.state_digests() | {"progress": json.dumps(progress.to_dict(), sort_keys=True)}
    brief = strategy.share(step, content_digest(json.dumps(own, sort_keys=True).encode()).encode())
    if len(set(brief)) == 1:
        return
    everyone = [json.loads(payload) for payload in strategy.share(step, json.dumps([strategy.worker, own]).encode())]
    usual = Counter(brief).most_common(1)[0][0]
    odd, rest = (
        [told for told, b in zip(everyone, brief, strict=True) if (b == usual) is same] for same in (False, True)
    )
    name = first_difference(odd[0][1], rest[0][1])
    raise DivergedError(
        f"The replicas differ after step {step}: {_workers(odd)} and {_workers(rest)} hold different bits, first in "
        f"'{name}'. This state was not saved."
    )


def _workers(told: list[Any]) -> str:
    return f"worker{'s' if len(told) > 1 else ''} {', '.join(str(worker) for worker, _ in told)}"
