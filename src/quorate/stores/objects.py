"""Objects under a prefix of a store, such as ``s3://bucket/prefix``: a thin layer over fsspec.

Credentials come from where the store's own library looks for them: the environment, a profile, the machine's role. No
message ever shows one.
"""

import contextlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from quorate.core.addresses import normalised, shown
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.storage.objects import SLOWEST, ObjectMissing, ObjectStore, Stored, StoreError, refuse_secret

PATIENCE = 30.0
"""Seconds after which a store that has not answered counts as away, besides that for the bytes that are moved."""

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs"}
# One try and no more: whoever copies tries again by itself, and says so meanwhile.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 1}}}
}
_TRIES = 2
# In a text: what stands before an @ like a name and a password; a query.
_LOGIN = re.compile(r"[^\s\"'<>/@:=(]+:[^\s\"'<>]*@")
_QUERY = re.compile(r"\?[^\s\"'<>=]+=[^\s\"'<>]*")
_BEYOND = ("InvalidRange", "416")
_EXISTS = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
_UNREACHABLE = ("Connect", "Connection", "ClientOSError", "ServerDisconnected", "HTTPClientError", "gaierror")


class ObjectExists(StoreError):  # noqa: N818 (a happening, not a mistake)
    """The store has it already."""


def refuse_unknown_store(url: str) -> None:
    """Refuse a kind of store that cannot be spoken to here, before anything is trained. Imports nothing."""
    refuse_secret(url)
    protocol = normalised(url).partition("://")[0]
    package = _PACKAGES.get(protocol)
    if package is not None and importlib.util.find_spec(package) is None:
        raise RequestError(_without_package(url, protocol, f"No module named '{package}'"))
    if package is None:
        from fsspec import available_protocols

        if protocol not in available_protocols():
            raise RequestError(_unknown(url, protocol))


class FsspecStore(ObjectStore):
    """A kind of store that fsspec knows. A URL with a secret in it is refused."""

    def __init__(self, url: str, like: "FsspecStore | None" = None) -> None:
        refuse_secret(url)
        self.url = normalised(url).rstrip("/")
        self._protocol, _, self._root = self.url.partition("://")
        self._opened: Any = None if like is None else like._opened

    @property
    def serves_threads(self) -> bool:
        # Each call is then handed to one event loop, which is safe.
        with self._explaining():
            return bool(getattr(self._filesystem, "async_impl", False))

    def below(self, prefix: str) -> "FsspecStore":
        return FsspecStore(f"{self.url}/{prefix}", self)

    def put_file(self, key: str, file: Path) -> None:
        size = file.stat().st_size
        with self._explaining():
            self._do("put_file", str(file), self._path(key), bytes=size)

    def put(self, key: str, content: bytes) -> None:
        with self._explaining():
            self._do("pipe_file", self._path(key), content, bytes=len(content))

    def create(self, key: str, content: bytes) -> bool:
        try:
            with self._explaining():
                self._do("pipe_file", self._path(key), content, bytes=len(content), mode="create")
        except ObjectExists:
            return False
        return True

    def names(self) -> tuple[str, ...]:
        with self._explaining():
            try:
                found = self._do("ls", self._base or "/", detail=False)
            except FileNotFoundError:
                return ()
        return tuple(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        with self._explaining(key):
            try:
                content: bytes = self._do("cat_file", self._path(key), start=start or None, end=end, bytes=length or 0)
            except Exception as error:
                # Where the object ends before the range begins, a store says so in its own words.
                is_beyond = _code(error) in _BEYOND or getattr(error, "status", None) == 416
                if not (start or end) or not is_beyond:
                    raise
                return b""
            return content

    def size(self, key: str) -> int:
        with self._explaining(key):
            return _stored(self._do("info", self._path(key))).bytes

    def fetch(self, key: str, file: Path, bytes: int) -> None:
        with self._explaining(key):
            self._do("get_file", self._path(key), str(file), bytes=bytes)

    def list(self) -> dict[str, Stored]:
        with self._explaining():
            found = self._do("find", self._base or "/", detail=True)
            below = f"{self._base}/"
            # Some stores list the prefix itself, or folders, as objects.
            files = {name: entry for name, entry in found.items() if name.startswith(below) and entry["type"] == "file"}
            return {name.removeprefix(below): _stored(entry) for name, entry in files.items()}

    def remove(self, key: str) -> None:
        with contextlib.suppress(ObjectMissing), self._explaining(key):
            self._do("rm_file", self._path(key))

    # --- speaking with the library

    @property
    def _base(self) -> str:
        """The prefix as the library spells it: with the host that it is on, or without."""
        return str(self._filesystem._strip_protocol(self.url)).rstrip("/")

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    @property
    def _filesystem(self) -> Any:
        opened = self._opened  # which another thread may give up meanwhile
        if opened is None:
            # Here, because only a job with such a place should wait for it.
            import fsspec

            try:
                kind = fsspec.get_filesystem_class(self._protocol)
            except ImportError as error:
                raise StoreError(_without_package(self.url, self._protocol, str(error)), lasts=True) from None
            except ValueError:
                raise StoreError(_unknown(self.url, self._protocol), lasts=True) from None
            # Some have the host and the port from the address.
            options = _OPTIONS.get(self._protocol.removesuffix("a"), {}) | kind._get_kwargs_from_urls(self.url)
            if wanted := _wanted(kind, options):
                raise StoreError(
                    f"{self} cannot be opened: the library for {self._protocol}:// needs {' and '.join(wanted)}"
                    ", and this address does not say.",
                    lasts=True,
                )
            # Not one that was opened earlier: it would go on with credentials that were changed since.
            opened = kind(skip_instance_cache=True, use_listings_cache=False, **options)
            if hasattr(opened, "retries"):
                opened.retries = _TRIES
            self._opened = opened
        return opened

    def _do(self, method: str, *arguments: Any, bytes: int = 0, **options: Any) -> Any:
        filesystem = self._filesystem
        if not getattr(filesystem, "async_impl", False):
            return getattr(filesystem, method)(*arguments, **options)
        from fsspec.asyn import sync

        # The library's own limits do not hold for a store that accepts a connection and then says nothing.
        limit = PATIENCE + bytes / SLOWEST
        call: Callable[..., Any] = getattr(filesystem, f"_{method}")
        return sync(filesystem.loop, call, *arguments, timeout=limit, **options)

    @contextlib.contextmanager
    def _explaining(self, key: str = "") -> Iterator[None]:
        """Turn whatever the library raises into one kind of error, which says what helps."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            explained = self._explained(error, key)
            if explained.lasts:
                self._opened = None  # what is mended meanwhile is seen by one that is opened anew
            raise explained from None

    def _explained(self, error: Exception, key: str) -> StoreError:
        code, name = _code(error), type(error).__name__
        if isinstance(error, FileNotFoundError) and key and code != "NoSuchBucket":
            return ObjectMissing(f"{self}: there is no object {key}.")
        if isinstance(error, FileExistsError) or code in _EXISTS:
            return ObjectExists(f"{self}: it is there already.")
        lasting = self._for_a_person(error, code)
        if lasting is not None:
            return StoreError(f"{self}: {lasting}", lasts=True)
        if isinstance(error, TimeoutError) or "Timeout" in name:
            why = "the store does not answer in time. It may be overloaded, or the network slow or cut."
        elif isinstance(error, ConnectionError) or any(word in name for word in _UNREACHABLE):
            endpoint = ", and AWS_ENDPOINT_URL if it is not Amazon's" if self._protocol in _PACKAGES else ""
            why = f"the store cannot be reached ({name}). Check that it is up{endpoint}."
        else:
            # Without what might be a secret: a library may repeat parts of a URL in its own way.
            text = _QUERY.sub("?…", _LOGIN.sub("…@", shown(" ".join(str(error).split()))))[:200]
            why = f"the store cannot do it: {(text or name).rstrip('.')}."
        return StoreError(f"{self}: {why}")

    def _for_a_person(self, error: Exception, code: str) -> str | None:
        """What only a person can mend, and how."""
        if code == "NoSuchBucket":
            return f"there is no bucket '{self._root.partition('/')[0]}'. Create it, or correct the address."
        where = "the credentials in the environment"
        if self._protocol in _PACKAGES:
            where = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the AWS profile"
        check = f"Check {where}, and that they may list, read, write and delete there."
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
            return f"no credentials are found. {check}"
        if isinstance(error, PermissionError) or code in ("401", "403", "AccessDenied", "ExpiredToken"):
            return f"access is refused{f' ({code})' if code else ''}. {check}"
        return None


def _stored(entry: dict[str, Any]) -> Stored:
    modified = next((entry[name] for name in ("LastModified", "updated", "mtime", "created") if entry.get(name)), None)
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    moment = float(modified) if isinstance(modified, int | float) else None
    return Stored(int(entry.get("size") or 0), moment, str(entry.get("ETag") or entry.get("etag") or ""))


def _code(error: BaseException) -> str:
    """What a store of Amazon's kind calls the trouble."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def _wanted(kind: Any, options: dict[str, Any]) -> list[str]:
    """What a library must be told and is not. It is not tried: some of them die noisily half made."""
    arguments = list(inspect.signature(kind.__init__).parameters.values())[1:]
    named = [each for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return [each.name for each in named if each.default is each.empty and each.name not in options]


def _unknown(url: str, protocol: str) -> str:
    return f"{shown(url)}: '{protocol}' is not a kind of store that fsspec knows; s3:// is one."


def _without_package(url: str, protocol: str, reason: str) -> str:
    if protocol in _PACKAGES:
        return f"{shown(url)} needs the package {_PACKAGES[protocol]}: {install_of('s3')}."
    return f"{shown(url)} cannot be opened: {reason.rstrip('.')}."
