"""What a checkpoint is: the page that says which parts belong to it, and which is written last."""

import base64
import hmac
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from quorate.checkpoint.cipher import Cipher
from quorate.core.digests import content_digest
from quorate.core.errors import CheckpointError, NewerFormatError, UntrustedError
from quorate.core.generation import Cursor, Phase
from quorate.core.user_code import given

FORMAT = 3
MANIFEST = "manifest.json"
Content = dict[str, Any]

_HEAD = '{{"digest": "{digest}",\n'
# No folder and no odd character: a manifest must not reach outside its checkpoint.
_FILE = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
_TEXTS = ("created", "weights_digest", "tag")
_MAPPINGS = ("job", "environment", "metrics")
_MOST = 2**53
MOST_INCARNATIONS = 2**31
"""Coordinators that a run can have had: one a second, for decades. Far below what a manifest may say (`_MOST`), so that
numbering on from the highest credible one stays readable for ever."""
_Kind = TypeVar("_Kind")


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
        head = _HEAD.format(digest=digest)
        is_sound = text.startswith(head) and content_digest(text[len(head) :].encode()) == digest
        try:
            _refuse_unknown(content)
        except NewerFormatError:
            # A flipped bit may make any number of a format; only what is sound was written by a newer version.
            if is_sound:
                raise
        if not is_sound:
            raise CheckpointError("the manifest differs from its own digest: it was edited or damaged")
        try:
            present = _migrated(content)
            parts = [_part(fields) for fields in _as("parts", present["parts"], list)]
            _check(present)
            generation = _generation(present["generation"])
            return cls(**{**present, "parts": tuple(parts), "generation": generation})
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(f"the manifest is of another kind: it has {', '.join(content)}") from None

    def sealed(self, cipher: Cipher | None) -> "Manifest":
        """The same with its skeleton encrypted, if there is a cipher; called last, since it is bound to the parts."""
        if cipher is None:
            return self
        sealed = b"".join(cipher.seal([json.dumps(self.skeleton).encode()], self._bound()))
        return replace(self, skeleton=base64.b64encode(sealed).decode(), encryption=cipher.label).tagged(cipher)

    def tagged(self, cipher: Cipher) -> "Manifest":
        """The same with what shows that somebody with the key has written it, to the last letter."""
        return replace(self, tag=cipher.tag(self._vouched_for()))

    def check_tag(self, cipher: Cipher) -> None:
        """Raise where it was not written by somebody with the key: its digest anybody can make."""
        if not hmac.compare_digest(self.tag.encode(), cipher.tag(self._vouched_for()).encode()):
            raise UntrustedError(
                f"the manifest of step {self.step} is not authentic: it was changed by somebody without the key"
            )

    def opened(self, cipher: Cipher | None) -> "Manifest":
        """The same with its skeleton in plain; the cipher is the one that `key.cipher_of` finds."""
        if self.encryption is None:
            return self
        if cipher is None:
            raise CheckpointError(f"the skeleton of step {self.step} is encrypted, and no key is given")
        try:
            sealed = base64.b64decode(self.skeleton, validate=True)
            skeleton = json.loads(cipher.open(sealed, self._bound()))
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


def _part(fields: Any) -> Part:
    part = Part(**_as("a part", fields, dict))
    if not _FILE.fullmatch(_as("the file of a part", part.file, str)):
        raise CheckpointError(f"the manifest has a part {part.file!r}, which is no name of a file in the checkpoint")
    _as_count(f"the size of part {part.file}", part.bytes)
    _as(f"the digest of part {part.file}", part.digest, str)
    return part


def _check(content: dict[str, Any]) -> None:
    """Its digest tells that nothing was changed since it was written, not that what was written is a manifest."""
    _as_count("step", content["step"])
    _as_count("phase", content["phase"])
    for key in _TEXTS:
        _as(key, content[key], str)
    for key in _MAPPINGS:
        _as(key, content[key], dict)
    for name, value in content["metrics"].items():
        if type(value) not in (int, float):
            raise CheckpointError(f"the manifest is of another kind: metric {name!r} is {given(value)}")
    if content["best"] is not None:
        _as_count("the step of the best", _as("best", content["best"], dict)["step"])
    encryption = content["encryption"]
    if encryption is not None:
        for key, value in _as("encryption", encryption, dict).items():
            _as(f"encryption.{key}", value, str)


def _generation(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    incarnation, number = _as("generation", value, list)
    for each in (incarnation, number):
        _as_count("generation", each)
        if each > _MOST:
            raise CheckpointError(f"the manifest is of another kind: generation is {given(value)}")
    return incarnation, number


def _as(what: str, value: Any, kind: type[_Kind]) -> _Kind:
    # The exact type: to Python, true is a number.
    if type(value) is not kind:
        raise CheckpointError(f"the manifest is of another kind: {what} is {given(value)}")
    return value


def _as_count(what: str, value: Any) -> None:
    if _as(what, value, int) < 0:
        raise CheckpointError(f"the manifest is of another kind: {what} is {value}, less than none")


def _parsed(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the manifest is not JSON: it was cut short or damaged ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"the manifest is a {type(content).__name__} where an object is expected")
    return content


# --- manifests of earlier formats, brought to the present one as they are read; the files stay as they are


def _migrated(content: Content) -> Content:
    """The content of a manifest of any format that was ever released, in the present one."""
    _refuse_unknown(content)
    while content["format"] != FORMAT:
        content = _STEPS[content["format"]](content)
    return content


def _refuse_unknown(content: Content) -> None:
    """Raise `CheckpointError` for a format that is not known, and `NewerFormatError` for that of a later version."""
    given = content.get("format")
    # The exact type: to Python, true equals 1.
    if type(given) is int and given > FORMAT:
        raise NewerFormatError(f"was written by a newer Quorate (format {given}; this one reads up to {FORMAT})")
    if type(given) is not int or given not in (*_STEPS, FORMAT):
        known = f"{', '.join(map(str, _STEPS))} and {FORMAT}"
        raise CheckpointError(f"the manifest has format {given!r} and this version of Quorate reads formats {known}")


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
