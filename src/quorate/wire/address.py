"""Addresses as people write them: ``host:port``, ``[::1]:port``."""


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
