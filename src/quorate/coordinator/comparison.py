"""What must be equal in all workers: facts and state when they join, weights when they are done."""

from collections.abc import Sequence

from quorate.coordinator.events import Completed, Registered
from quorate.core.digests import first_difference
from quorate.core.errors import DivergedError, RequestError
from quorate.core.failure import Failure

CANARY = "canary"
_NOT_GIVEN = "(not given)"


def join_difference(newcomer: Registered, first: Registered) -> Failure | None:
    """Why a newcomer cannot compute the same bits as the first worker, if so."""
    message = _fact_difference(newcomer, first) or _tensor_difference(newcomer, first)
    if message is None:
        return None
    # Before the first step nothing is lost yet: the task, or the request, is wrong.
    exit_code = RequestError.exit_code if first.cursor.step == 0 else DivergedError.exit_code
    return _diverged(message, newcomer.worker).at(exit_code=exit_code)


def completion_difference(completed: Sequence[Completed]) -> Failure | None:
    """Which workers ended with other weights than the first, if any did."""
    first = completed[0]
    other = next((done for done in completed if done.digest != first.digest), None)
    if other is None:
        return None
    digests = ", ".join(f"worker {done.worker} has {done.digest}" for done in completed)
    return _diverged(
        f"worker {other.worker} ended with other weights than worker {first.worker}: {digests}."
        " Something in the task depends on the worker: time, a generator of its own, a file that changes.",
        other.worker,
    )


def _fact_difference(newcomer: Registered, first: Registered) -> str | None:
    names = {*newcomer.facts, *first.facts}
    # The canary last: other libraries sing otherwise, and the library is what a person can change.
    for name in sorted(names, key=lambda name: (name == CANARY, name)):
        mine, theirs = newcomer.facts.get(name, _NOT_GIVEN), first.facts.get(name, _NOT_GIVEN)
        if mine != theirs:
            return (
                f"worker {newcomer.worker}'s {name} {mine} differs from worker {first.worker}'s {theirs}:"
                f" {_meaning(name, newcomer, first)}."
            )
    return None


def _meaning(fact: str, newcomer: Registered, first: Registered) -> str:
    if fact == CANARY:
        return "the machines do not compute alike"
    where = f" (hosts {newcomer.host} and {first.host})" if newcomer.host != first.host else ""
    return f"all workers of a job need the same{where}"


def _tensor_difference(newcomer: Registered, first: Registered) -> str | None:
    if newcomer.cursor != first.cursor:
        return None  # who is behind copies the state of who is ahead
    tensor = first_difference(dict(newcomer.tensors), dict(first.tensors))
    if tensor is None:
        return None
    if first.cursor.step > 0:
        return (
            f"worker {newcomer.worker} holds another state than worker {first.worker} at step {first.cursor.step}:"
            f" they first differ in '{tensor}'. They read other checkpoints, or one of them is damaged."
        )
    return (
        f"worker {newcomer.worker} built other initial weights than worker {first.worker}: they first differ in"
        f" '{tensor}'. The model is built without a fixed seed: draw from the global generators of torch, NumPy and"
        " Python, which are seeded before `model()` is called, and not from the time or a generator of your own."
    )


def _diverged(message: str, worker: int) -> Failure:
    return Failure(DivergedError.__name__, message, worker=worker)
