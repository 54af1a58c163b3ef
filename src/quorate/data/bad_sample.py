"""A sample that the data do not give: told by its file, left out of its batch where the job allows it."""

from collections.abc import Sequence

MOST_TOLD = 10
"""So many bad samples of a run are told one by one, each with what is wrong."""
_LONGEST = 300


class BadSample(Exception):  # noqa: N818 (it is about the sample)
    """A record that cannot be read or decoded, whoever tries: its text says which, where it lies and what is wrong.

    Only for what follows from the data alone. A disk that fails or memory that runs out is another matter: another
    worker would have read the sample. `traceback` is of the `decode` that raised, if one did.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        self.message = message
        self.traceback = traceback
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.traceback)


class LeftOut:
    """The bad samples of a batch or of several, and what is wrong with the first of them: all of it may travel with
    every step."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._why: list[str] = []

    def add(self, index: int, error: BadSample) -> None:
        """One more."""
        self._indices.append(index)
        if len(self._why) < MOST_TOLD:
            self._why.append(error.message if len(error.message) <= _LONGEST else f"{error.message[:_LONGEST]} …")

    def extend(self, indices: Sequence[int], why: Sequence[str]) -> None:
        """Those of another batch, which says of its first ones what is wrong."""
        # Where it does not say so of all, it has as many reasons as are told: none can be missing in between.
        self._why += why[: MOST_TOLD - len(self._why)]
        self._indices += indices

    @property
    def indices(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(self._indices)

    @property
    def why(self) -> tuple[str, ...]:
        """What is wrong with the first of them."""
        return tuple(self._why)

    @property
    def reasons(self) -> tuple[tuple[int, str], ...]:
        """The first of them, each with what is wrong."""
        return tuple(zip(self._indices, self._why, strict=False))

    def others(self, indices: Sequence[int]) -> Sequence[int]:
        """Those that are not among them."""
        if not self._indices:
            return indices
        bad = set(self._indices)
        return [index for index in indices if index not in bad]
