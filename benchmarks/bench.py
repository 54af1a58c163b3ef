"""What every benchmark is to the one who runs it."""

from collections.abc import Sequence
from typing import Protocol

from benchmarks.row import Row
from benchmarks.system import Turn


class Bench(Protocol):
    """One benchmark. The launcher asks for its turns once, and for the rest when everything is measured."""

    @property
    def name(self) -> str:
        """What is typed."""
        ...

    @property
    def headline(self) -> str:
        """What is measured, in a sentence."""
        ...

    def turns(self) -> list[Turn]:
        """One round: every system, every case."""
        ...

    def label(self, row: Row) -> str:
        """In which case a row was measured, for people; rows with the same label are compared."""
        ...

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with all details that follow from comparing them."""
        ...

    def remarks(self, row: Row) -> dict[str, str]:
        """What stands behind the milliseconds of a row, for people, by the names of their columns."""
        ...
