"""The file of an index, beside its shards: in the layout of safetensors, a header in JSON and arrays behind it.

The same shards give the same file, byte for byte.
"""

import json
from pathlib import Path

import numpy
import xxhash

from quorate.core.addresses import is_url, shown
from quorate.core.errors import RequestError
from quorate.core.regular_file import read_regular
from quorate.data.shards.index import ARRAYS, VERSION, ShardIndex
from quorate.storage.atomic import write_atomically
from quorate.storage.objects import ObjectMissing, ObjectStore, refuse_secret

NAME = "index.quorate"


def load_index(place: str | Path) -> ShardIndex:
    """Read the index of a folder or URL of shards, or an index file itself, and check its digest."""
    name = str(place).rstrip("/")
    if not is_url(name):
        path = Path(name).expanduser().absolute()
        file = path / NAME if path.is_dir() else path
        if path.is_file() and path.suffix != Path(NAME).suffix:
            raise RequestError(
                f"{path} is a file of data, and no index. Give the folder that was indexed, such as {path.parent}"
            )
        return decode(_read_file(file, name), str(file), str(file.parent))
    refuse_secret(name)
    parent, _, last = name.rpartition("/")
    if not last.endswith(Path(NAME).suffix):
        parent, last = name, NAME
    try:
        content = ObjectStore(parent).read(last)
    except ObjectMissing:
        raise _missing(name) from None
    return decode(content, f"{parent}/{last}", parent)


def save_index(index: ShardIndex, place: str | Path) -> None:
    """Write the index file: whole or not at all. `place` is the file, or its URL."""
    if is_url(str(place)):
        parent, _, last = str(place).rpartition("/")
        ObjectStore(parent).put(last, encode(index))
    else:
        write_atomically(Path(place), encode(index))


def encode(index: ShardIndex) -> bytes:
    """The content of the index file."""
    return b"".join([_head(index), *(array.tobytes() for array in index.arrays.values())])


def decode(content: bytes, file: str, beside: str) -> ShardIndex:
    """The index that a file's bytes are of; `beside` is the folder or URL that the file lies in."""
    try:
        return _decoded(content, beside)
    except _Unreadable as error:
        raise RequestError(f"{shown(file)} {error}.{_again(error.place or _guessed(beside, file), file)}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise RequestError(
            f"{shown(file)} is damaged: it is no index of shards any more.{_again(_guessed(beside, file), file)}"
        ) from None


def _decoded(content: bytes, beside: str) -> ShardIndex:
    size = int.from_bytes(content[:8], "little")
    head, data = content[8 : 8 + size], memoryview(content)[8 + size :]
    header = json.loads(head)
    about = header.pop("__metadata__")
    version = int(about["version"])
    if version != VERSION:
        place = _joined(beside, about.get("root", ""))
        raise _Unreadable(f"has version {version}, and this Quorate reads version {VERSION}", place)
    arrays = {}
    for name, (_, kind) in ARRAYS.items():
        begin, end = header[name]["data_offsets"]
        arrays[name] = numpy.frombuffer(data[begin:end], kind).reshape(header[name]["shape"])
    root = about["root"]
    index = ShardIndex(
        kind=about["kind"],
        schema=json.loads(about["schema"]),
        shards=tuple(about["shards"].split("\n")) if about["shards"] else (),
        root=root,
        place=_joined(beside, root),
        **arrays,
    )
    # That of the root is compared with the rest of the header.
    if index.digest != about["digest"] or _head(index) != content[: 8 + size]:
        raise _Unreadable("is damaged: a digest is not that of its content")
    return index


def _head(index: ShardIndex) -> bytes:
    """The header with the digest of the data and that of where they lie, and its length before it."""
    root_digest = xxhash.xxh3_128_hexdigest(index.root.encode())
    head = index.head(digest=index.digest, root=index.root, root_digest=root_digest)
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


class _Unreadable(Exception):  # noqa: N818
    """Why a file is not an index that can be used; `place` is that of its shards, where it can be told."""

    def __init__(self, why: str, place: str = "") -> None:
        self.place = place
        super().__init__(why)


def _read_file(file: Path, named: str) -> bytes:
    try:
        return read_regular(file)
    except (FileNotFoundError, NotADirectoryError):
        folder = file.parent if file.suffix == Path(NAME).suffix else file
        if not folder.exists():
            raise RequestError(f"{folder}: there is no such folder.") from None
        raise _missing(named) from None
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}.") from None


def _missing(place: str) -> RequestError:
    folder = place.rpartition("/")[0] or "." if place.endswith(Path(NAME).suffix) else place
    return RequestError(
        f"{shown(place)} has no index of its shards yet. Make it with: quorate data index {shown(folder)}"
    )


def _guessed(beside: str, file: str) -> str:
    """Where the shards of an index lie that cannot be read: one of another name may have them anywhere."""
    return beside if file == f"{beside}/{NAME}" else "PATH"


def _again(place: str, file: str) -> str:
    is_beside = file == f"{place}/{NAME}"
    output = "" if is_beside else f" --output {shown(file)}"
    return f" Make it again with: quorate data index {shown(place)}{output} --force"


def _joined(beside: str, root: str) -> str:
    if not root:
        return beside
    return root if is_url(root) or root.startswith("/") else str(Path(beside, root))
