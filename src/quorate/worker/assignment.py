"""What a worker is told when it starts."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from quorate.core.fault import Fault
from quorate.training.run_mode import RunMode

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Assignment:
    """Everything that one worker process needs to know; it travels as JSON from the launcher."""

    run: str
    slot: int
    workers: int
    task: str
    job: dict[str, Any]
    job_source: str
    coordinator: str
    token: str
    checkpoint: str | None = None
    is_replacement: bool = False
    mode: RunMode = field(default_factory=RunMode)
    faults: tuple[Fault, ...] = ()
    host: str = LOOPBACK
    # The namespace that it lives in, if it is another than that of its parent.
    network: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Assignment":
        """From that line."""
        fields = json.loads(text)
        faults = tuple(Fault.from_dict(fault) for fault in fields["faults"])
        return cls(**fields | {"mode": RunMode(**fields["mode"]), "faults": faults})
