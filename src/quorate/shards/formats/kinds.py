"""Which kind of shard a file is, by the ending of its name."""

import re

from quorate.core.errors import RequestError
from quorate.shards.formats.format import Format
from quorate.shards.formats.hdf5 import Hdf5
from quorate.shards.formats.lines import JsonLines, TextLines
from quorate.shards.formats.parquet import Parquet
from quorate.shards.formats.tar import Tar
from quorate.shards.formats.tfrecord import TfRecord

_FORMATS: dict[str, type[Format]] = {each.kind: each for each in (Tar, Parquet, JsonLines, TextLines, Hdf5, TfRecord)}
ENDINGS = {ending: kind for kind, each in _FORMATS.items() for ending in each.endings}
_NUMBER = re.compile(r"-\d+-of-\d+$")
_COMPRESSED = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".zip")


def kind_of(name: str) -> str | None:
    """What a file is; None if it is no shard. A number behind the ending is that of the shard, as Beam writes it."""
    bare = _NUMBER.sub("", name.lower())
    return next((kind for ending, kind in ENDINGS.items() if bare.endswith(ending)), None)


def is_compressed_shard(name: str) -> bool:
    """Whether a file would be a shard if it were not compressed as a whole."""
    lower = name.lower()
    ending = next((ending for ending in _COMPRESSED if lower.endswith(ending)), None)
    return ending is not None and (ending == ".tgz" or kind_of(lower.removesuffix(ending)) is not None)


def format_of(kind: str) -> Format:
    """The format of a kind, for one reader: it may keep what it has read of the shards."""
    if kind not in _FORMATS:
        raise RequestError(f"'{kind}' is not a kind of shard; there are {', '.join(_FORMATS)}.")
    return _FORMATS[kind]()
