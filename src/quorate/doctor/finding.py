"""What a check has found."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How much a finding matters: only a problem keeps jobs from running as they should."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it is, and what to do about it."""

    name: str
    level: Level
    text: str
    remedy: str = ""
