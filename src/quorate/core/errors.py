"""Everything that Quorate raises, in one tree.

What each of them means stands at its class; some are defined where they are raised.

::

    QuorateError
    ├── RequestError         JobFileError, TaskError, FaultError, RunError (DamagedFileError)
    ├── OutputError
    └── JobError             JobFailed, JobEnded, Dismissed, EngineLost, ClusterFailed, DebuggerQuit,
        │                    UserCodeError, LossError, MetricError, UnsupportedModelError (CannotDefer), RegistryError,
        │                    ClockViolation, RunBusyError
        ├── HostLost         NodeLost, GroupLost
        ├── DivergedError    ReplicasDiffer (SettingsDiffer, ResidualsLost, LanesDiffer)
        ├── CheckpointError  NewerFormatError, ForeignError, AttemptGone, NoSpace, UntrustedError
        ├── StoreError       ObjectMissing, ObjectExists
        ├── ShardError       BadRecord, DamagedBlock
        ├── Unreachable      StoreAway
        ├── WorkerUnfit      HelperLost, OutOfMemory, GpuLost, LanesDisputed
        └── LinkError        PeerLost, FrameError (MalformedGradient), LeaseExpired, GenerationOver, StateLost
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quorate.core.generation import member_of


class QuorateError(Exception):
    """Base class of all errors that Quorate raises."""

    exit_code = 1

    @property
    def message(self) -> str:
        """What happened, in words."""
        return str(self)

    def __reduce__(self) -> tuple[object, ...]:
        # They cross processes with their fields, whatever they are made from.
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[QuorateError], args: tuple[object, ...], fields: dict[str, object]) -> QuorateError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(fields)
    return error


class RequestError(QuorateError):
    """The request was wrong. Nothing was trained, and nothing was lost."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a job file: where it is, what is wrong there, and what to write instead.

    `keys` are the other keys that take part in it, where it is about several.
    """

    path: str
    text: str
    hint: str = ""
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        hint = f" {self.hint}" if self.hint else ""
        return f"{self.path}: {self.text}.{hint}"


class JobFileError(RequestError):
    """All mistakes in a job file, or in what overrides it. `source` says where they are, `problems` lists them."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = f"{len(self.problems)} mistakes" if len(self.problems) != 1 else "a mistake"
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{source} has {count}:{lines}")


class TaskError(RequestError):
    """The task cannot be found, or returns something that cannot be trained."""


class RunError(RequestError):
    """A run does not exist, is complete, is in use, or has no checkpoint."""


class DamagedFileError(RunError):
    """A file of a run that was cut off or edited."""


class OutputError(QuorateError):
    """The command did its work and could not say so: standard output is full or closed."""


class JobError(QuorateError):
    """The job failed."""


class DebuggerQuit(JobError):  # noqa: N818 (a happening, not a mistake)
    """A person has left the debugger; the job ends as interrupted."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.exit_code = 130


class UserCodeError(JobError):
    """An exception in the task, with the user's own traceback; before the first step its exit code is 2."""

    def __init__(self, message: str, traceback: str, exit_code: int = JobError.exit_code) -> None:
        self.traceback = traceback
        self.exit_code = exit_code
        super().__init__(message)


class LossError(JobError):
    """A loss that is not finite, not a scalar, or not a loss; of one that is not finite, the samples it was of."""

    def __init__(self, message: str, samples: Sequence[int] = ()) -> None:
        self.samples = tuple(samples)
        super().__init__(message)


class MetricError(JobError):
    """A metric that is not a number, or that is not there."""


class UnsupportedModelError(JobError):
    """A kind of gradient or buffer that cannot keep the promise."""


class DivergedError(JobError):
    """Replicas, machines or code that should be equal are not."""


class ReplicasDiffer(DivergedError):  # noqa: N818 (a happening, not a mistake)
    """Workers that have trained together hold other bits than each other; `culprits` are wrong, if that can be told."""

    def __init__(self, message: str, culprits: Sequence[int] = ()) -> None:
        self.culprits = tuple(culprits)
        super().__init__(message)


class SettingsDiffer(ReplicasDiffer):
    """Their optimizers have other settings, which is rather for code to do than for bad memory."""


class ResidualsLost(ReplicasDiffer):
    """What lanes had held back of their gradients is gone with its host: all go back to the newest checkpoint."""


class LanesDiffer(ReplicasDiffer):
    """Workers have computed the same lane to other bits. All go back to a checkpoint that cannot have any of it."""


class CheckpointError(JobError):
    """A checkpoint that cannot be written or read."""


class AttemptGone(CheckpointError):  # noqa: N818 (a happening, not a mistake)
    """Another writer has given a save up, or a later one has swept it away."""


class NewerFormatError(CheckpointError):
    """A checkpoint that a newer version of Quorate has written: not damaged, and not for this version."""


class UntrustedError(CheckpointError):
    """A checkpoint that anybody may have written, where only those with the key should have."""


class WorkerUnfit(JobError):  # noqa: N818
    """A worker cannot go on, and another in its place can: it counts as lost. Its text begins in lower case."""


class HelperLost(WorkerUnfit):
    """A process that a worker has forked for itself is gone."""


class OutOfMemory(WorkerUnfit):
    """There is not enough memory where a worker is."""


class GpuLost(WorkerUnfit):
    """The GPU of a worker has failed: what it holds is gone, and its process can compute nothing more."""


class LanesDisputed(WorkerUnfit):
    """Two workers have computed a lane to other bits, and each repeats its own: this one makes room for a third."""


class LinkError(JobError):
    """Trouble between two processes."""


class PeerLost(LinkError):  # noqa: N818 (a happening, not a mistake)
    """The other end is gone. A worker or a server is named as such, with whatever else helps to find it:
    "worker 2 (this host)"."""

    CLOSED_HERE = "the link was closed on this side"

    def __init__(self, peer: str, detail: str) -> None:
        self.peer = peer
        self.detail = detail
        super().__init__(f"{peer} is gone: {detail}")

    @property
    def worker(self) -> int | None:
        """Who is at the other end of the link that failed; None where this side has closed it itself."""
        named = re.match(r"(?:worker|server) \d+\b", self.peer)
        return member_of(named[0].replace(" ", "-")) if named and self.detail != self.CLOSED_HERE else None


class FrameError(LinkError):
    """The other end speaks of another job, generation or place."""


class LeaseExpired(LinkError):  # noqa: N818
    """The coordinator has not been heard for too long."""


class GenerationOver(LinkError):  # noqa: N818
    """The coordinator has ended the generation that a worker is in."""


class StateLost(LinkError):  # noqa: N818
    """Servers were lost, and with them parameters that nobody else holds, as all members of a generation have found
    together. They leave it, and the job goes back to its newest checkpoint."""


def is_kind_of(name: str, *kinds: type[JobError]) -> bool:
    """Whether an error of this name, as another process tells it, is of one of these kinds."""
    return any(kind.__name__ == name or is_kind_of(name, *kind.__subclasses__()) for kind in kinds)
