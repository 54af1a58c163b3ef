"""What a checkpoint is: the page that says which parts belong to it, and which is written last."""

import base64
import hmac
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from quorate.core.digests import Buffer, content_digest
from quorate.core.errors import CheckpointError, NewerFormatError, UntrustedError
from quorate.core.generation import Cursor, Phase
from quorate.core.user_code import given

FORMAT = 3
MANIFEST = "manifest.json"
Content = dict[str, Any]
Boxes = Callable[[tuple[Any, ...], tuple[int, ...]], Any]
"""Which part of a tensor of the state a reader wants, a `pieces.Box`, by its place in the tree and its shape; None for
all of it."""

_HEAD = '{{"digest": "{digest}",\n'
PART_NAME = re.compile(r"([0-9]{1,9})-of-[0-9]{1,9}\.([0-9a-f]{32}|[0-9a-f]{64})\.safetensors(?:\.enc)?")
"""What a part is called: its number, its digest, and how it ends where it is encrypted."""
_FIRST_NAME = "state.safetensors"
"""What format 1 called its only part. A checkpoint may be fetched from where others write: no other file is one of it,
least of all one that could be imported."""
_KINDS = {
    **dict.fromkeys(("step", "phase"), int),
    **dict.fromkeys(("created", "weights_digest", "tag"), str),
    **dict.fromkeys(("job", "environment", "metrics"), dict),
}
_MOST = 2**53
MOST_INCARNATIONS = 2**31
"""Coordinators that a run can have had: one a second, for decades. Far below what a manifest may say (`_MOST`), so that
numbering on from the highest credible one stays readable for ever."""


class Seal(ABC):
    """Seals and opens contents with one key, which has an id; `label` is what a manifest says of it, and `tag` vouches
    for a content that stays readable: without the key nobody makes the right one.

    `seal` gives the sealed bytes of a content that comes in pieces; it opens only with the same context, which it
    lacks. `open` raises `CheckpointError` for anything but exactly what was sealed; `open_from` is the same of so many
    bytes as they stream, where `fill` fills a buffer with the next of them.
    """

    key_id: str

    @property
    @abstractmethod
    def label(self) -> dict[str, str]: ...

    @abstractmethod
    def tag(self, content: bytes) -> str: ...

    @abstractmethod
    def seal(self, chunks: Iterable[Buffer], context: bytes = b"") -> Iterator[bytes]: ...

    @abstractmethod
    def open(self, content: Buffer, context: bytes = b"") -> memoryview: ...

    @abstractmethod
    def open_from(self, fill: Callable[[memoryview], None], size: int, context: bytes = b"") -> memoryview: ...


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint, with the digest of the bytes that lie in it: to verify it takes no key."""

    file: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the content of its tensors.

    `best` is the best evaluation so far, with its `step` and `value`; `generation` is that of the writer: incarnation
    and number. Where the checkpoint is encrypted, `encryption` names cipher and key id, `skeleton` is sealed, and `tag`
    vouches for everything else.
    """

    step: int
    phase: int
    created: str
    parts: tuple[Part, ...]
    skeleton: Any
    weights_digest: str
    job: dict[str, Any]
    environment: dict[str, Any]
    metrics: dict[str, Any]
    encryption: dict[str, str] | None = None
    best: dict[str, Any] | None = None
    generation: tuple[int, int] | None = None
    tag: str = ""
    format: int = FORMAT

    @property
    def cursor(self) -> Cursor:
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
        """From what `to_json` wrote, now or by an earlier version; anything else is refused with what is wrong."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"the manifest is not JSON: it was cut short or damaged ({error})") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"the manifest is a {type(content).__name__} where an object is expected")
        digest = content.pop("digest", None)
        head = _HEAD.format(digest=digest)
        is_sound = text.startswith(head) and content_digest(text[len(head) :].encode()) == digest
        version = content.get("format")
        # The exact type: to Python, true equals 1.
        if type(version) is not int or not (version in _STEPS or version >= FORMAT):
            known = f"{', '.join(map(str, _STEPS))} and {FORMAT}"
            raise CheckpointError(
                f"the manifest has format {version!r} and this version of Quorate reads formats {known}"
            )
        if not is_sound:
            raise CheckpointError("the manifest differs from its own digest: it was edited or damaged")
        # A flipped bit may make any number of a format; only what is sound was written by a newer version.
        if version > FORMAT:
            raise NewerFormatError(f"was written by a newer Quorate (format {version}; this one reads up to {FORMAT})")
        try:
            present = content
            while present["format"] != FORMAT:
                present = _STEPS[present["format"]](present)
            return cls(**_checked(present))
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(f"the manifest is of another kind: it has {', '.join(content)}") from None

    def sealed(self, cipher: Seal) -> "Manifest":
        """The same with its skeleton encrypted; called last, since it is bound to the parts."""
        sealed = b"".join(cipher.seal([json.dumps(self.skeleton).encode()], self._bound()))
        return replace(self, skeleton=base64.b64encode(sealed).decode(), encryption=cipher.label).tagged(cipher)

    def tagged(self, cipher: Seal) -> "Manifest":
        """The same with what shows that somebody with the key has written it, to the last letter."""
        return replace(self, tag=cipher.tag(self._vouched_for()))

    def check_tag(self, cipher: Seal) -> None:
        """Raise where it was not written by somebody with the key: its digest anybody can make."""
        if not hmac.compare_digest(self.tag.encode(), cipher.tag(self._vouched_for()).encode()):
            raise UntrustedError(
                f"the manifest of step {self.step} is not authentic: it was changed by somebody without the key"
            )

    def opened(self, cipher: Seal | None) -> "Manifest":
        """The same with its skeleton in plain; the cipher is the one that `key.cipher_of` finds."""
        if self.encryption is None:
            return self
        if cipher is None:
            raise CheckpointError(f"the skeleton of step {self.step} is encrypted, and no key is given")
        try:
            sealed = base64.b64decode(self.skeleton, validate=True)
            skeleton = json.loads(bytes(cipher.open(sealed, self._bound())))
        except CheckpointError as error:
            raise CheckpointError(f"the skeleton of step {self.step} cannot be decrypted: {error}") from None
        except (TypeError, ValueError):
            raise CheckpointError(f"the skeleton of step {self.step} is not encrypted as the manifest says") from None
        return replace(self, skeleton=skeleton, encryption=None, tag="")

    def _vouched_for(self) -> bytes:
        return json.dumps(asdict(replace(self, tag="")), sort_keys=True).encode()

    def _bound(self) -> bytes:
        """What a sealed skeleton is bound to: with parts of another checkpoint it does not open."""
        parts = [[part.bytes, part.digest] for part in self.parts]
        return json.dumps([self.step, self.phase, self.weights_digest, parts]).encode()

    def __post_init__(self) -> None:
        if self.phase not in tuple(Phase):
            raise CheckpointError(f"phase is {self.phase!r} and must be one of {[int(phase) for phase in Phase]}")


def _checked(content: Content) -> Content:
    """Its digest tells that nothing was changed since it was written, not that what was written is a manifest."""
    parts: list[Part] = []
    for fields in _as("parts", content["parts"], list):
        part = Part(**_as("a part", fields, dict))
        if part.file != _FIRST_NAME and not PART_NAME.fullmatch(_as("the file of a part", part.file, str)):
            raise CheckpointError(
                f"the manifest has a part {part.file!r}, which is not the name of a part of the checkpoint"
            )
        _as(f"the size of part {part.file}", part.bytes, int)
        _as(f"the digest of part {part.file}", part.digest, str)
        parts.append(part)
    for key, kind in _KINDS.items():
        _as(key, content[key], kind)
    for name, value in content["metrics"].items():
        _as(f"metric {name!r}", value, int, float)
    if content["best"] is not None:
        _as("the step of the best", _as("best", content["best"], dict)["step"], int)
    if content["encryption"] is not None:
        for key, value in _as("encryption", content["encryption"], dict).items():
            _as(f"encryption.{key}", value, str)
    generation = content["generation"]
    if generation is not None:
        incarnation, number = _as("generation", generation, list)
        if max(_as("generation", incarnation, int), _as("generation", number, int)) > _MOST:
            raise CheckpointError(f"the manifest is of another kind: generation is {given(generation)}")
        generation = incarnation, number
    return {**content, "parts": tuple(parts), "generation": generation}


def _as(what: str, value: Any, *kinds: type) -> Any:
    # The exact type: to Python, true is a number.
    if type(value) not in kinds:
        raise CheckpointError(f"the manifest is of another kind: {what} is {given(value)}")
    if kinds == (int,) and value < 0:
        raise CheckpointError(f"the manifest is of another kind: {what} is {value}, less than none")
    return value


# --- manifests of earlier formats, brought to the present one as they are read; the files stay as they are


def _from_1(content: Content) -> Content:
    """Format 1 had one kind of digest, in a field of that name, and nothing was encrypted. What it says of the weights
    is a digest of another kind, which compares with none of today's."""
    parts = [
        {"file": part["file"], "bytes": part["bytes"], "digest": f"xxh3-128:{part['xxh3_128']}"}
        for part in content["parts"]
    ]
    return {**content, "format": 2, "parts": parts, "encryption": None, "weights_digest": ""}


def _from_2(content: Content) -> Content:
    """Format 2 did not say which evaluation was the best so far, nor which generation has written it, and a key
    vouched for its tensors only."""
    return {**content, "format": 3, "best": None, "generation": None, "tag": ""}


_STEPS: dict[int, Callable[[Content], Content]] = {1: _from_1, 2: _from_2}
