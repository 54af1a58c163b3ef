"""Why a job ended, as a value that crosses processes and is kept in the run folder."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from quorate.core.errors import JobError, QuorateError, RequestError, UserCodeError


@dataclass(frozen=True)
class Failure:
    """One sentence that says what happened, and the place where it did."""

    kind: str
    message: str
    worker: int | None = None
    lane: int | None = None
    step: int | None = None
    phase: str = ""
    traceback: str = ""
    exit_code: int = 1

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure that an exception amounts to."""
        if isinstance(error, JobFailed):
            return error.failure
        return cls(
            kind=type(error).__name__,
            message=str(error),
            traceback=error.traceback if isinstance(error, UserCodeError) else "",
            exit_code=error.exit_code if isinstance(error, QuorateError) else 1,
        )

    def at(self, **place: Any) -> "Failure":
        """The same failure with its place filled in (worker, lane, step, phase)."""
        return replace(self, **place)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Failure":
        """From JSON."""
        return cls(**fields)

    def error(self) -> QuorateError:
        """What the launcher raises for it."""
        return RequestError(self.message) if self.exit_code == RequestError.exit_code else JobFailed(self)


class JobFailed(JobError):  # noqa: N818
    """A whole job ended with a failure; `run` names the run, if there is one."""

    def __init__(self, failure: Failure, run: str = "") -> None:
        self.failure = failure
        self.run = run
        super().__init__(f"{failure.message}\n\n{failure.traceback}".rstrip())

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failure, self.run)
