"""One thing that happened: a step, a lost worker, a saved checkpoint."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(frozen=True)
class Event:
    """What happened, when, at which step; `fields` are plain JSON values.

    Kinds: run, generation, copied, step, evaluation, checkpoint, checkpoint_failed, checkpoint_skipped, copied_to,
    copy_failed, copy_recovered, lost, stop, failure, finished, log.
    """

    kind: str
    step: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    @property
    def key(self) -> tuple[str, int | None]:
        """Two events of one kind at one step are the same event, told twice."""
        return self.kind, self.step

    def to_json(self) -> str:
        """One line of `events.jsonl`."""
        place = {} if self.step is None else {"step": self.step}
        content = {"kind": self.kind, "time": round(self.time, 6), **place, **self.fields}
        return _encoded(content)

    @classmethod
    def from_json(cls, line: str) -> "Event":
        """The event that a line tells."""
        fields = json.loads(line)
        return cls(fields.pop("kind"), fields.pop("step", None), time=fields.pop("time"), fields=fields)


def _encoded(content: dict[str, Any]) -> str:
    """JSON without blanks. By orjson, which takes a twelfth of the time, wherever it writes the same."""
    with suppress(orjson.JSONEncodeError):
        line = orjson.dumps(content)
        # It writes null for what is not finite.
        if b"null" not in line:
            return line.decode()
    return json.dumps(content, separators=(",", ":"))
