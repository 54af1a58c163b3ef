"""What `quorate.Shards` is given: looked for where it may lie, and refused in a sentence if it cannot be meant."""

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quorate.core.addresses import is_url, shown
from quorate.core.errors import RequestError, TaskError
from quorate.core.user_code import PACKAGE, given
from quorate.data.shards.disk_cache import DiskCache
from quorate.data.shards.index import NAME, ShardIndex

MOST_SAMPLES, MOST_BYTES = 8192, 12_000_000
"""What a lane shuffles at a time by default: so many samples, or fewer if they are large."""
COLUMNAR = ("parquet", "hdf5")
"""The kinds of shards that have columns."""
_GB = 1_000_000_000
_CACHE_GB = 10


def placed(path: str | os.PathLike[str], *, is_made: bool = False) -> str:
    """Absolute: beside the file whose code gives a relative path or, if there is nothing, in the working folder.

    One that is nowhere is refused unless it `is_made` by whoever asks.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise TaskError(f"The folder of shards or of a cache is a path or a text, not {given(path)}.")
    if is_url(name):
        return name.rstrip("/")
    expanded = Path(name).expanduser()
    if expanded.is_absolute():
        return str(expanded)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    beside = (Path(frame.f_code.co_filename).parent / expanded).absolute()
    working = expanded.absolute()
    found = beside if beside.exists() else working
    # An index that is missing in a folder is told by whoever reads it, with the command that makes it.
    folder = found.parent if found.suffix == Path(NAME).suffix else found
    if not is_made and not folder.exists():
        also = "" if beside == working else f"{beside} (beside the task's file) and "
        raise RequestError(f"{name}: there is no such folder: looked for {also}{working} (in the working folder).")
    return str(found)


def checked_decode(decode: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """The function that makes samples, if there is one."""
    if decode is not None and not callable(decode):
        raise TaskError(f"decode= takes a function from a record to a sample, not {given(decode)}.")
    return decode


def checked_columns(columns: Sequence[str] | None, index: ShardIndex) -> list[str] | None:
    """The columns that are chosen; None for all of them."""
    if columns is None:
        return None
    if index.kind not in COLUMNAR:
        raise TaskError(f"columns= chooses columns of Parquet and HDF5; these shards are {index.kind}.")
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise TaskError(f"columns= takes a list of names such as ['image', 'label'], not {given(columns)}.")
    unknown = [name for name in columns if name not in index.schema]
    if unknown:
        raise TaskError(f"The shards have no column {unknown[0]!r}; they have {', '.join(index.schema)}.")
    repeated = next((name for name, times in Counter(columns).items() if times > 1), None)
    if repeated is not None:
        raise TaskError(f"columns= names {repeated!r} more than once. Name each column once.")
    return list(columns)


def checked_window(window: int | None, index: ShardIndex) -> int:
    """How many samples are shuffled at a time."""
    if window is None:
        size = int(index.sizes.sum())
        return max(1, min(MOST_SAMPLES, len(index) * MOST_BYTES // max(1, size)))
    if type(window) is not int or window < 1:
        raise TaskError(f"window= takes a whole number of samples of at least 1, not {given(window)}.")
    return window


def checked_cache_key(key: str | None, needed: bool) -> str | None:
    """What the user calls what `decode` makes; a cache of decoded samples needs it."""
    if key is None and needed:
        raise TaskError(
            'cache= keeps the samples that decode= makes, and needs cache_key= with it: a text such as "v1" that says '
            "what decode makes. Samples are used again under the same key only; give another one whenever decode, or "
            "anything that it depends on, has changed."
        )
    if key is not None and (not isinstance(key, str) or not key):
        raise TaskError(f'cache_key= takes a text that is not empty, such as "v1", not {given(key)}.')
    return key


def checked_cache(cache: Mapping[str, Any] | None) -> DiskCache | None:
    """The cache that is asked for, if one is."""
    if cache is None:
        return None
    takes = f'cache= takes {{"folder": PATH, "gb": how much it may hold, {_CACHE_GB} by default}}'
    if not isinstance(cache, Mapping):
        raise TaskError(f"{takes}, not {given(cache)}.")
    unknown = [key for key in cache if key not in ("folder", "gb")]
    if unknown:
        raise TaskError(f"{takes}, and no {unknown[0]!r}.")
    if "folder" not in cache:
        raise TaskError(f'{takes}; its "folder" is missing.')
    gb = cache.get("gb", _CACHE_GB)
    is_number = isinstance(gb, int | float) and not isinstance(gb, bool) and math.isfinite(gb)
    if not is_number or gb * _GB < 1:
        raise TaskError(f'The "gb" of cache= is a number above 0 of 1,000,000,000 bytes, such as 20, not {given(gb)}.')
    folder = placed(cache["folder"], is_made=True)
    if is_url(folder):
        raise TaskError(f'The "folder" of cache= is on a local disk, such as "/scratch/cache", not {shown(folder)}.')
    try:
        return DiskCache(Path(folder), int(gb * _GB))
    except RequestError as error:
        raise RequestError(f"{error.message} Give cache= another folder, or leave it out.") from None
