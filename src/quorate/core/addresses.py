"""Places by their text alone: hosts and ports (``host:port``, ``[::1]:port``), and URLs, shown without secrets."""

import re

# In a text: what follows the protocol of a URL.
_ADDRESS = re.compile(r"(?<=://)[^\s\"'<>]+")
_HOST = re.compile(r"(\[[^\]]*\]|[^:@]*)(:\d*)?")


def join_address(host: str, port: int) -> str:
    """One text for a host and a port; an IPv6 host is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host and the port that an address names."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    if not colon or not plain or not port.isdecimal() or (":" in plain and not bracketed):
        raise ValueError(f"{address!r} is not an address: write host:port, or [host]:port for IPv6")
    return plain, int(port)


def is_url(text: str) -> bool:
    """Whether a place is a URL, and not a folder."""
    return "://" in text


def normalised(place: str) -> str:
    """A URL with its protocol in small letters, as libraries know them; anything else as it is."""
    protocol, separator, address = place.partition("://")
    return f"{protocol.lower()}{separator}{address}" if separator else place


def has_secret(place: str) -> bool:
    """Whether a place is a URL with a password or a query in it; a user alone is none."""
    if not is_url(place):
        return False
    address = place.partition("://")[2]
    user, _, host = address.partition("/")[0].rpartition("@")
    return "?" in address or ":" in user or _HOST.fullmatch(host) is None


def shown(text: str) -> str:
    """A URL, or a text with URLs, without what might be a secret in it."""
    return _ADDRESS.sub(lambda found: _harmless(found[0]), text)


def shown_place(place: str) -> str:
    """A place and nothing else, without what might be a secret in it, also if there are blanks in that."""
    protocol, separator, address = place.partition("://")
    return f"{protocol}{separator}{_harmless(address)}" if separator else place


def _harmless(address: str) -> str:
    address, query, _ = address.partition("?")
    host, slash, path = address.partition("/")
    before, at, _ = host.rpartition("@")
    if not at and _HOST.fullmatch(host) is None:
        before, at, _ = address.rpartition("@")  # some secrets have a slash in them
        if not at:
            return "…"
    kept = f"…{address[len(before) :]}" if at else f"{host}{slash}{path}"
    return f"{kept}?…" if query else kept
