"""What a checkpoint is: the page that says which parts belong to it, and which is written last."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from quorate.core.cursor import Cursor, Phase
from quorate.core.digests import content_digest
from quorate.core.errors import CheckpointError

FORMAT = 1
_HEAD = '{{"digest": "{digest}",\n'


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint."""

    file: str
    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the content of its tensors."""

    step: int
    phase: int
    created: str
    parts: tuple[Part, ...]
    skeleton: Any
    weights_digest: str
    job: dict[str, Any]
    environment: dict[str, Any]
    metrics: dict[str, Any]
    format: int = FORMAT

    @property
    def cursor(self) -> Cursor:
        """The point of the job at which it was saved."""
        return Cursor(self.step, Phase(self.phase))

    def to_json(self) -> str:
        """As JSON that begins with a digest of all that follows, so that a torn or edited one is found."""
        content = {"format": self.format, **asdict(self)}
        try:
            lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        except TypeError as error:
            raise CheckpointError(f"the manifest of step {self.step} cannot be written as JSON: {error}") from None
        rest = ",\n".join(lines) + "\n}\n"
        return _HEAD.format(digest=content_digest(rest.encode())) + rest

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """From what `to_json` wrote; anything else is refused with what is wrong."""
        content = _parsed(text)
        digest = content.pop("digest", None)
        if content.get("format") != FORMAT:
            raise CheckpointError(
                f"the manifest has format {content.get('format')!r} and this version of Quorate reads format {FORMAT}"
            )
        head = _HEAD.format(digest=digest)
        if not text.startswith(head) or content_digest(text[len(head) :].encode()) != digest:
            raise CheckpointError("the manifest differs from its own digest: it was edited or damaged")
        try:
            return cls(**{**content, "parts": tuple(Part(**part) for part in content["parts"])})
        except (TypeError, KeyError):
            raise CheckpointError(f"the manifest is of another kind: it has {', '.join(content)}") from None

    def __post_init__(self) -> None:
        if self.phase not in tuple(Phase):
            raise CheckpointError(f"phase is {self.phase!r} and must be one of {[int(phase) for phase in Phase]}")


def _parsed(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the manifest is not JSON: it was cut short or damaged ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"the manifest is a {type(content).__name__} where an object is expected")
    return content
