"""The order in which the units of a sharded model run: it must be the same in all workers.

FSDP2 gathers and sums by units, whoever's they are. Workers that run different ones would gather weights of one block
with those of another, wait for ever, or have their process aborted by Gloo, as the sizes do not fit. So they ask each
other before each unit in the first steps of a generation. After that each knows what comes next, and need not ask:
whoever finds that its own turn is another leaves the generation, and in the next all ask before every unit again.
"""

from collections.abc import Callable, Sequence

from quorate.core.errors import GenerationOver, UnsupportedModelError
from quorate.core.generation import Member, names_of

ASKED_STEPS = 2
"""So many steps of a generation are asked about; where they are alike, those that follow are taken to be so too."""

DONE = "no other unit"

Gather = Callable[[bytes], tuple[bytes, ...]]
"""What each member of the generation tells, in their order."""


class UnitOrder:
    """Follows what this worker runs, and compares it with what the others do."""

    def __init__(self) -> None:
        self.varies = False
        """Whether steps are not all alike: then workers ask each other always."""
        self._gather: Gather | None = None
        self._members: Sequence[Member] = ()
        self._step: int | None = None
        self._run: list[str] = []
        self._expected: list[str] | None = None
        self._asked = 0

    def follow(self, gather: Gather, members: Sequence[Member]) -> None:
        """From now on with these: some of them may be new here. All of them call it."""
        self._members, self._gather = members, gather if len(members) > 1 else None
        self._step, self._expected, self._asked = None, None, 0
        self._run.clear()
        if self._gather is not None:
            self.varies = b"1" in self._gather(b"1" if self.varies else b"0")

    def leave(self) -> None:
        """The generation is over: nobody can be asked."""
        self._gather = None

    def begin(self, step: int) -> None:
        """What runs now is of this step, until `end`."""
        self._step = step
        self._run.clear()

    def enter(self, what: str) -> None:
        """Before a unit is gathered or summed: return if all others are about to do the same."""
        if self._gather is None:
            return
        if self._is_known:
            place = len(self._run)
            if self._expected is None or self._expected[place : place + 1] != [what]:
                raise self._changed(what)
        else:
            self._compare(self._gather(what.encode()))
        if self._step is not None:
            self._run.append(what)

    def end(self) -> None:
        """Before workers exchange anything else: return if none of them has still to run a unit."""
        if self._gather is None:
            return
        if not self._is_known:
            self._compare(self._gather(DONE.encode()))
        elif self._run != self._expected:
            raise self._changed(DONE)
        if self._step is not None:
            self.varies = self.varies or self._expected not in (None, self._run)
            self._expected = list(self._run)
            self._asked += 1
        self._step = None

    @property
    def _is_known(self) -> bool:
        """Not in an evaluation, which has as many passes as there are samples."""
        return self._step is not None and not self.varies and self._asked >= ASKED_STEPS

    def _changed(self, what: str) -> GenerationOver:
        self.varies = True
        expected = [*(self._expected or ()), DONE][len(self._run)]
        return GenerationOver(
            f"in step {self._step}, {what} comes where {expected} has come in all steps before: whether it is so for "
            "all workers is seen when the step is done again"
        )

    def _compare(self, told: Sequence[bytes]) -> None:
        if len(set(told)) == 1:
            return
        by_word: dict[str, list[int]] = {}
        for member, word in zip(self._members, told, strict=True):
            by_word.setdefault(word.decode(), []).append(member.worker)
        found = "; ".join(f"{names_of(workers)}: {word}" for word, workers in by_word.items())
        where = "an evaluation" if self._step is None else f"step {self._step}"
        raise UnsupportedModelError(
            f"In {where} workers go through different parts of the model. What comes next for {found}. With strategy: "
            "fsdp all workers gather the weights of a part together, so which ones run, and in which order, must not "
            "depend on samples or random numbers (LayerDrop, early exits, experts chosen by an if). Run all of them "
            "and multiply by 0, gather them together (strategy.units), or use ddp."
        )
