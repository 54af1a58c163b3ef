"""What must be equal in all workers: facts and state when they join, weights when they are done."""

from collections.abc import Sequence

from quorate.coordinator.events import Completed, Registered
from quorate.core.digests import first_difference, outvoted
from quorate.core.errors import DivergedError, ReplicasDiffer, RequestError
from quorate.core.failure import Failure

CANARY = "canary"
_DATA = ("dataset", "dataset layout")
_LIBRARY = "library "
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
    """Which workers ended with other weights than most, if any did."""
    found = outvoted({done.worker: done.digest for done in completed})
    if found is None:
        return None
    digests = ", ".join(f"worker {done.worker} has {done.digest}" for done in completed)
    return Failure(
        ReplicasDiffer.__name__,
        f"the workers ended with different weights: {digests}.",
        culprits=found[1],
    )


def _fact_difference(newcomer: Registered, first: Registered) -> str | None:
    names = {*newcomer.facts, *first.facts}
    # The canary last, and data before it: other libraries sing and decode otherwise, and the library is what a person
    # can change.
    for name in sorted(names, key=lambda name: (name == CANARY, name in _DATA, name)):
        mine, theirs = newcomer.facts.get(name, _NOT_GIVEN), first.facts.get(name, _NOT_GIVEN)
        # A library that decodes samples is given where it is loaded, and need not be used.
        if mine != theirs and not (name.startswith(_LIBRARY) and _NOT_GIVEN in (mine, theirs)):
            return _described(name, mine, theirs, newcomer, first)
    return None


def _described(fact: str, mine: str, theirs: str, newcomer: Registered, first: Registered) -> str:
    where = f" (hosts {newcomer.host} and {first.host})" if newcomer.host != first.host else ""
    if fact in _DATA:
        # One that was started again is compared with what it was before.
        whose = "it did before" if newcomer.worker == first.worker else f"worker {first.worker}"
        return (
            f"worker {newcomer.worker} reads other data than {whose} ({fact} {mine}, not {theirs}): all "
            f"workers of a job need the same{where}. Give all of them the same files, the same index of shards and the "
            "same datasets() (its length, columns=, window=); what was changed while the job ran has to be restored "
            "before it is resumed."
        )
    meaning = "the machines do not compute alike" if fact == CANARY else f"all workers of a job need the same{where}"
    return f"worker {newcomer.worker}'s {fact} {mine} differs from worker {first.worker}'s {theirs}: {meaning}."


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
