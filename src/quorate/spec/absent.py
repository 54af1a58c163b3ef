"""What stands for a value that is not there, where null is a value."""

from enum import Enum


class Absent(Enum):
    """A key that was not given."""

    NOT_GIVEN = "not given"

    def __str__(self) -> str:
        return self.value
