"""What is noted on every key of a job file beside its type."""

from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """Whether a key changes what a job produces."""

    MEANING = "meaning"  # it changes the bits
    MANNER = "manner"  # it changes how the job runs, never what it produces
    LABEL = "label"  # it only names things, and is never compared


@dataclass(frozen=True)
class Allowed:
    """What a key takes, worded to follow "is not": "a whole number of at least 1"."""

    text: str
