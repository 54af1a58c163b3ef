"""The identity of a run: one digest of everything that its bits depend on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.core.cached import cached_property
from quorate.spec.meaning import LENGTH
from quorate.storage.identity_file import read_identity
from quorate.storage.run_folder import RunFolder

PROVEN = "proven"


@dataclass(frozen=True)
class Identity:
    """What the bits of a run depend on: two runs are comparable if their digests are equal.

    `facts` are in groups (job, task, versions, machine, data). `data` says whether the data are known to the last byte,
    and how or why not: "proven: …" or "unproven: …". Where that is unproven, equal digests do not promise equal data.
    `any_length`: a job with other `steps` or `epochs` goes through the same states, as far as both go.
    """

    facts: dict[str, Any]
    data: str
    any_length: bool = False

    @classmethod
    def of_run(cls, run: RunFolder) -> "Identity | None":
        """What the run has recorded; None where that is not enough: an earlier version did not record it, no worker has
        begun, or parts of the run were computed by other code, versions or machines."""
        return cls.of_record(read_identity(run))

    @classmethod
    def of_record(cls, recorded: Mapping[str, Any] | None) -> "Identity | None":
        """From what a worker has found."""
        facts = None if recorded is None else recorded.get("facts")
        if recorded is None or not isinstance(facts, dict):
            return None
        return cls(facts, str(recorded.get("data", "unproven")), recorded.get("any_length") is True)

    @cached_property
    def digest(self) -> str:
        """Sha-256 over the facts as canonical JSON."""
        return _digest(self.facts)

    @cached_property
    def prefix(self) -> str:
        """The same without the length of the job: whose is equal goes through the same states, if `any_length` of the
        one that was trained says so."""
        return _digest({**self.facts, "job": self.facts.get("job", {}) | dict.fromkeys(LENGTH)})

    @property
    def is_proven(self) -> bool:
        return self.data.startswith(PROVEN)


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
