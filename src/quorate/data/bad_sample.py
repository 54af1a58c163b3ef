"""A sample that the data do not give: told by its file, left out of its batch where the job allows it."""

import re
from collections.abc import Sequence

from quorate.core.errors import JobError

SKIP = "`on_bad_sample: skip` leaves such samples out."
COLLATE = "or write collate(self, samples), which may pad or convert them."

MOST_TOLD = 10
"""So many reasons of bad samples are told of a run, each with the first sample that has it."""
_LONGEST, _COMPARED = 300, 250
# A number by itself, such as that of a row; one that is part of a name, a path or a digest is another matter.
_NUMBER = re.compile(r"(?<![\w./-])\d[\d,]*(?![\w./-]*\w)")


class BadSample(Exception):  # noqa: N818 (it is about the sample)
    """A record that cannot be read or decoded, whoever tries: its text says which, where it lies and what is wrong.

    Only for what follows from the data alone. A disk that fails or memory that runs out is another matter: another
    worker would have read the sample. `traceback` is of the `decode` that raised, if one did. `hint` says what to do,
    and `more` what else is to be said where it is left out.
    """

    def __init__(self, message: str, traceback: str = "", hint: str = SKIP, more: str = "") -> None:
        self.message, self.traceback, self.hint, self.more = message, traceback, hint, more
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.traceback, self.hint, self.more)


class Unreachable(JobError):  # noqa: N818 (a happening, not a mistake)
    """Data that cannot be read now, which says nothing about what they are: never a reason to skip a sample."""


def without_numbers(text: str) -> str:
    """The same for all samples of a file that are bad for the same reason, whatever their rows are."""
    # Its end is left out: where a long text was cut depends on how long its numbers are.
    return _NUMBER.sub("#", text)[:_COMPARED]


class LeftOut:
    """The bad samples of a batch or of several, and what is wrong with the first of each file and reason: all of it may
    travel with every step."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        # One for each of them, empty where it is not worth a word.
        self._why: list[str] = []
        self._kinds: set[str] = set()

    def add(self, index: int, error: BadSample) -> None:
        text = error.message if len(error.message) <= _LONGEST else f"{error.message[:_LONGEST]} …"
        self._take(index, f"{text}{error.more}")

    def extend(self, indices: Sequence[int], why: Sequence[str]) -> None:
        """Those of another batch, with what it says of its first ones."""
        for position, index in enumerate(indices):
            self._take(index, why[position] if position < len(why) else "")

    def _take(self, index: int, text: str) -> None:
        self._indices.append(index)
        kind = without_numbers(text) if text and len(self._kinds) < MOST_TOLD else ""
        is_told = bool(kind) and kind not in self._kinds
        self._why.append(text if is_told else "")
        if is_told:
            self._kinds.add(kind)

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(self._indices)

    @property
    def why(self) -> tuple[str, ...]:
        """What is wrong with the first of them, one by one; empty where the same was said of one before."""
        told = [position for position, text in enumerate(self._why) if text]
        return tuple(self._why[: told[-1] + 1]) if told else ()

    @property
    def reasons(self) -> tuple[tuple[int, str], ...]:
        """The first of each file and reason, with what is wrong."""
        return tuple((index, text) for index, text in zip(self._indices, self._why, strict=True) if text)

    def others(self, indices: Sequence[int]) -> Sequence[int]:
        if not self._indices:
            return indices
        bad = set(self._indices)
        return [index for index in indices if index not in bad]
