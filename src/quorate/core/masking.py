"""Secrets do not leave a job: what is written for people to read goes through `mask` first.

Known secrets are values of environment variables and parameters that are named like secrets, the job's token, keys of
checkpoints, and whatever else is registered. Besides these, what looks like a secret by itself is masked: credentials
in URLs, headers of authorization, keys of well-known services.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

MASK = "***"
LEFT_OUT = " … (too long: the rest of this line is left out)"

LEAST = 6
"""A shorter secret is not masked: it would be found in ordinary words."""

_SECRET_WORDS = frozenset({"secret", "password", "passwd", "passphrase", "credential", "credentials"})
_WEAKER_WORDS = frozenset({"token", "key", "apikey"})
"""Training is full of tokens and keys that are none: their values must look like a secret as well."""
_NO_SECRET = frozenset({"file", "path", "dir", "folder", "name", "sock", "socket", "url", "uri", "env", "type", "id"})
"""Last words of names that only say where a secret is, or which."""


@dataclass(frozen=True)
class _Look:
    """Secrets that are known by how they look. Every text with such a secret has one of the hints in it, whatever the
    case of its letters: to look for these takes a fraction of what the pattern takes, and events are many."""

    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    masked: str = MASK


# Every repetition has a limit: no text, however long and strange, takes more than a multiple of its length.
_LOOKS = (
    _Look(
        ("@",),
        re.compile(r"(://)[^\s/@:\"'<>\[]{0,256}:(?!\d{1,5}(?:[/?#\s]|$))[^\s\"'<>]{1,256}@"),
        rf"\1{MASK}@",
    ),
    _Look(
        ("=",),
        re.compile(
            r"([?&][\w.-]{0,40}?(?:token|secret|password|passwd|signature|sig|key|credential)=)[^&\s\"'<>#]{1,4096}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    _Look(
        ("authorization",),
        re.compile(
            r"(authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:bearer|basic|token)\s{1,3})[^\s\"',;]{1,4096}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    _Look(
        ("bearer",),
        re.compile(
            r"\b(bearer\s{1,3})(?=[A-Za-z._~+/-]{0,64}\d)[A-Za-z0-9._~+/-]{16,4096}={0,2}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    _Look(
        ("aws_secret",),
        re.compile(r"(aws_secret_access_key[\"']?\s{0,3}[:=]\s{0,3}[\"']?)[A-Za-z0-9/+=]{40}", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    _Look(("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    _Look(("gh",), re.compile(r"gh[pousr]_[A-Za-z0-9]{36}")),
    _Look(
        ("github_pat_", "glpat-", "hf_", "sk-", "xox"),
        re.compile(
            r"\b(?:github_pat_\w{22,255}|glpat-[\w-]{20,64}|hf_[A-Za-z0-9]{30,64}"
            r"|sk-[\w-]{32,255}|xox[abprs]-[A-Za-z0-9-]{10,255})"
        ),
    ),
    _Look(("eyj",), re.compile(r"\beyJ[\w-]{10,4096}\.eyJ[\w-]{10,4096}\.[\w-]{10,4096}")),
    _Look(
        ("private key-----",),
        re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\s\S]{1,16384}?-----END [A-Z ]{0,40}PRIVATE KEY-----"),
    ),
)


_LONGEST_KEY = 2**14
_OPEN_KEY = re.compile(rb"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?![\s\S]*-----END )[\s\S]*")

_HINTS = tuple((hint, look) for look in _LOOKS for hint in look.hints)


def _all_forms(secrets: Iterable[str]) -> set[str]:
    return {form for secret in secrets for line in secret.splitlines() for form in _forms(line.strip())}


class Secrets:
    """Secrets that are known, and the masking of texts."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.known: tuple[str, ...] = ()
        self.add(known)

    def add(self, secrets: Iterable[str]) -> None:
        """Know these, too, as they are and as URLs and JSON write them; each line of one that has several."""
        # The longest first: one may be the beginning of another.
        self.known = tuple(sorted({*self.known, *_all_forms(secrets)}, key=lambda form: (-len(form), form)))

    def forget(self, secrets: Iterable[str]) -> None:
        """Know these no longer."""
        forms = _all_forms(secrets)
        self.known = tuple(form for form in self.known if form not in forms)

    def mask(self, text: str) -> str:
        """The text without the secrets in it."""
        for secret in self.known:
            if secret in text:
                text = text.replace(secret, MASK)
        small = text.lower()
        for hint, look in _HINTS:
            if hint in small:
                text = look.pattern.sub(look.masked, text)
        return text

    def mask_all(self, value: Any) -> Any:
        """The same for every text in mappings and lists; a value without any is returned as it is."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, Mapping):
            return {key: self.mask_all(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple) and any(isinstance(one, str | Mapping | list | tuple) for one in value):
            masked = [self.mask_all(inner) for inner in value]
            return masked if isinstance(value, list) else tuple(masked)
        return value


SECRETS = Secrets()
"""Those of this process; its environment's are among them from the first masking on."""
_environment_is_known = False


def mask(text: str) -> str:
    """The text without what this process knows to be secret, or what looks like it."""
    return _secrets().mask(text)


def mask_all(value: Any) -> Any:
    """The same for every text in mappings and lists."""
    return _secrets().mask_all(value)


def register_secrets(secrets: Iterable[str]) -> None:
    """Have these masked in this process from now on."""
    SECRETS.add(secrets)


def forget_secrets(secrets: Iterable[str]) -> None:
    """These mean nothing any more, such as the token of a job that has ended."""
    SECRETS.forget(secrets)


def known_secrets() -> tuple[str, ...]:
    """Those that this process knows, for another one of the same job."""
    return _secrets().known


def _secrets() -> Secrets:
    global _environment_is_known
    if not _environment_is_known:
        _environment_is_known = True
        SECRETS.add(secrets_in(os.environ))
    return SECRETS


def secrets_in(values: Mapping[str, Any]) -> Iterator[str]:
    """Values that are named like secrets, in an environment or a section of a job."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from secrets_in(value)
        elif isinstance(value, str | int) and not isinstance(value, bool) and is_secret(str(name), str(value)):
            yield str(value)


def is_secret(name: str, value: str) -> bool:
    """Whether a value is to be kept secret, by its name and by how it looks."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+", name)]
    if not words or words[-1] in _NO_SECRET or len(value.strip()) < LEAST:
        return False
    if _SECRET_WORDS.intersection(words):
        return True
    return words[-1] in _WEAKER_WORDS and _looks_random(value)


def shown_value(key: str, value: Any) -> Any:
    """A value of a job as it is shown: masked as a whole where its key is named like a secret's."""
    last = key.rpartition(".")[2]
    if last == "webhook" and isinstance(value, str):
        return shown_webhook(value)
    if isinstance(value, str | int) and not isinstance(value, bool) and is_secret(last, str(value)):
        return MASK
    return mask_all(value)


def url_secrets(url: str) -> Iterator[str]:
    """What is secret in an address to which messages are sent: whoever has the path of a webhook may use it."""
    _, _, address = url.partition("://")
    host, _, path = address.partition("/")
    credentials = host.rpartition("@")[0]
    yield from (part for part in (credentials, credentials.partition(":")[2], path) if len(part) >= LEAST)


def shown_webhook(url: str) -> str:
    """Where a message goes, without what gives the right to send one there."""
    protocol, _, address = url.partition("://")
    return f"{protocol}://{address.partition('/')[0].rpartition('@')[2].partition('?')[0]}/{MASK}"


class LineMasker:
    """Makes lines without secrets of what a process writes, however that is cut into pieces.

    A line ends with a line feed, or with a carriage return, by which progress bars write over themselves, and which it
    keeps. What is beyond `limit` bytes of a line is left out.
    """

    def __init__(self, mask: Callable[[str], str] = mask, limit: int = 2**18, reserve: int = 2**16) -> None:
        self._mask = mask
        self._limit = limit
        # No secret is longer: one that has only begun is in the last part of what was read.
        self._reserve = reserve
        self._rest = b""
        self._is_too_long = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete now."""
        if self._is_too_long:
            _, end, data = data.partition(b"\n")
            self._is_too_long = not end
        whole, self._rest = _complete(self._rest + data)
        lines = self._lines(whole)
        if len(self._rest) > self._limit:
            masked = self._mask(self._rest.decode(errors="backslashreplace"))
            lines.append(f"{masked[: -self._reserve]}{LEFT_OUT}")
            self._rest, self._is_too_long = b"", True
        return lines

    def finish(self) -> list[str]:
        """What is left, when nothing more comes."""
        rest, self._rest = self._rest, b""
        return self._lines(rest)

    def drop(self) -> None:
        """Forget the line that is not complete."""
        self._rest, self._is_too_long = b"", False

    def _lines(self, data: bytes) -> list[str]:
        lines = _lines(self._mask(data.decode(errors="backslashreplace"))) if data else []
        return [line if len(line) <= self._limit else f"{line[: self._limit]}{LEFT_OUT}" for line in lines]


def _forms(secret: str) -> Iterator[str]:
    if len(secret) >= LEAST:
        as_json = (json.dumps(secret, ensure_ascii=escapes)[1:-1] for escapes in (True, False))
        forms = (secret, quote(secret, safe=""), quote(secret), unquote(secret), *as_json)
        yield from (form for form in forms if len(form) >= LEAST)


def _looks_random(value: str) -> bool:
    if re.search(r"\s", value.strip()) or len(value) < 8:
        return False
    has_both = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return has_both or len(value) >= 20


def _complete(data: bytes) -> tuple[bytes, bytes]:
    """The lines that are complete, and the rest. A carriage return at the very end may be half of a line's end, and a
    private key is complete with its last line."""
    at = max(data.rfind(b"\n"), data.rfind(b"\r", 0, max(0, len(data) - 1))) + 1
    key = data.rfind(b"-----BEGIN ", 0, at)
    if key >= 0 and len(data) - key < _LONGEST_KEY and _OPEN_KEY.fullmatch(data, key, at):
        at = data.rfind(b"\n", 0, key) + 1  # with what stands before it in its line
    return data[:at], data[at:]


def _lines(text: str) -> list[str]:
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\r\n")
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines
