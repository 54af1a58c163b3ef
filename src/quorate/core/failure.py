"""Why a job ended, as a value that crosses processes and is kept in the run folder."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quorate.core.errors import (
    JobError,
    LossError,
    MetricError,
    PeerLost,
    QuorateError,
    ReplicasDiffer,
    RequestError,
    UnsupportedModelError,
    UserCodeError,
)
from quorate.core.generation import name_of
from quorate.core.masking import mask

_NAMED = 8

POISON_BATCH = "PoisonBatch"
"""The kind of a job's end by a step that kills every worker that takes it."""

_REPEATABLE = {error.__name__ for error in (UserCodeError, LossError, MetricError, UnsupportedModelError)}
_REPEATABLE |= {POISON_BATCH}


STOPPED = {130: "interrupted", 143: "terminated"}

CHECKPOINT_LOST = "CheckpointLost"
"""The kind of failure of a job of which nobody holds the state, and whose checkpoints are gone."""
FOLDER_LOST = "FolderLost"
"""The kind of failure of a job whose run was renamed or removed while it trained."""


@dataclass(frozen=True)
class Failure:
    """One sentence that says what happened, and the place where it did.

    `peer` is the worker at the other end, where it is a link that failed; `samples` are those that it is about;
    `culprits` are the workers whose state is wrong, where replicas differ and most of them agree.
    """

    kind: str
    message: str
    worker: int | None = None
    lane: int | None = None
    step: int | None = None
    phase: str = ""
    traceback: str = ""
    exit_code: int = 1
    peer: int | None = None
    samples: tuple[int, ...] = ()
    culprits: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        if isinstance(error, JobFailed):
            return error.failure
        return cls(
            kind=type(error).__name__,
            message=str(error),
            traceback=error.traceback if isinstance(error, UserCodeError) else "",
            exit_code=error.exit_code if isinstance(error, QuorateError) else 1,
            peer=error.worker if isinstance(error, PeerLost) else None,
            samples=error.samples if isinstance(error, LossError) else (),
            culprits=error.culprits if isinstance(error, ReplicasDiffer) else (),
        )

    def at(self, **place: Any) -> "Failure":
        """The same failure with its place filled in (worker, lane, step, phase)."""
        return replace(self, **place)

    @property
    def stopped(self) -> str | None:
        """The status of a run that a signal has ended, interrupted or terminated; None for one that has failed."""
        return STOPPED.get(self.exit_code)

    @property
    def place_in_words(self) -> str:
        """Where it happened, as far as that is known: server 1, step 3."""
        within = [
            f"{what} {number}" for what, number in (("lane", self.lane), ("step", self.step)) if number is not None
        ]
        return ", ".join([name_of(self.worker), *within])

    def masked(self) -> "Failure":
        """The same without secrets in what it says."""
        return replace(self, message=mask(self.message), traceback=mask(self.traceback))

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Few failures are about a link, samples or replicas: these are told only where there are any."""
        fields = asdict(self)
        for name in ("peer", "samples", "culprits"):
            if fields[name] in (None, ()):
                del fields[name]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Failure":
        listed = {name: tuple(fields.get(name, ())) for name in ("samples", "culprits")}
        return cls(**fields | listed)

    @property
    def is_refusal(self) -> bool:
        """Whether the request was wrong and all is said: an exception of the task leaves more to look at.

        Once a step has begun there is something to lose, and nothing is a mere refusal any more.
        """
        return self.exit_code == RequestError.exit_code and not self.traceback and not self.step

    @property
    def is_repeatable(self) -> bool:
        """Whether the same bits fail in the same way: going on helps only once something has been changed."""
        return self.kind in _REPEATABLE

    def error(self) -> QuorateError:
        """What the launcher raises for it."""
        return RequestError(self.message) if self.is_refusal else JobFailed(self)


@dataclass(frozen=True)
class Remains:
    """What a run that did not complete has left, and what to do next.

    `resume` is the command that goes on with it, None where nothing was saved; `advice` tells it in a sentence.
    """

    run: str
    folder: str
    logs: str
    resume: str | None
    advice: str


class JobFailed(JobError):  # noqa: N818
    """The job has failed. `failure` says why; `remains` says what is left and how to resume, if there is a run folder.

    `exit_code` is that of the failure.
    """

    def __init__(self, failure: Failure, remains: Remains | None = None) -> None:
        self.failure = failure
        self.exit_code = failure.exit_code
        self.remains = remains
        super().__init__(f"{failure.message}\n\n{failure.traceback}".rstrip())

    @property
    def run(self) -> str:
        """The name of the run; empty if there is none."""
        return self.remains.run if self.remains else ""


def name_samples(samples: Sequence[int], count: int | None = None) -> str:
    """The first few and how many there are: "samples 17, 530, 12 … (64 in all)"; `count` where not all are known."""
    in_all = len(samples) if count is None else count
    if in_all == 1 and samples:
        return f"sample {samples[0]}"
    if not samples:
        return f"{in_all} samples"
    more = f" … ({in_all} in all)" if in_all > _NAMED or in_all > len(samples) else ""
    return f"samples {', '.join(map(str, samples[:_NAMED]))}{more}"
