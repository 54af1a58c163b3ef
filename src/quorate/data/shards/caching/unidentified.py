"""What keeps a function from being identified: whatever may differ between two jobs without a trace in its code."""

import re

from quorate.data.shards.caching.installed import home_of

PLAIN_VALUE = "Hand over plain values instead, such as with functools.partial, and its samples are cached"
AT_THE_TOP = "Import it at the top of the file, and its samples are cached"
FROM_THE_RECORD = "Make the sample of its record alone, and it is cached"

# What these give is not of the record, nor of the code.
_OUTSIDE = {
    "os", "posix", "nt", "posixpath", "ntpath", "genericpath", "sys", "time", "_time", "subprocess", "socket",
    "_socket", "ssl", "http", "urllib.request", "ftplib", "tempfile", "glob", "shutil", "secrets", "uuid", "threading",
    "_thread", "multiprocessing", "concurrent", "asyncio", "ctypes", "mmap", "sqlite3", "_sqlite3", "platform",
    "locale", "inspect", "importlib", "gc", "weakref",
}  # fmt: skip
OUTSIDE_BUILTINS = {"open", "eval", "exec", "compile", "globals", "input", "__import__", "breakpoint"}
OUTSIDE_ATTRIBUTES = {
    "environ", "getenv", "read_text", "read_bytes", "urlopen", "fromfile", "now", "utcnow", "today",
    # These read files themselves, and Python does not hear of it.
    "imread", "imreadmulti", "read_image", "read_file", "read_video", "VideoCapture", "VideoReader", "truetype",
    "from_file", "safe_open", "load_file", "memory_map",
}  # fmt: skip
_READERS = re.compile(
    r"(pyarrow|polars)\.(.*[._])?(read|scan|open|dataset|ParquetFile|ORCFile)(_\w+)?|h5py\.(.*\.)?File"
)
_PATHS = ("basename", "commonpath", "commonprefix", "dirname", "isabs", "join", "normpath", "split", "splitext")
_HARMLESS = {"os.fspath", "os.sep", "sys.maxsize", "sys.byteorder"} | {
    f"{module}.{name}" for module in ("os.path", "posixpath", "ntpath", "genericpath") for name in _PATHS
}


class Unidentified(Exception):  # noqa: N818
    """The function depends on something that cannot be looked into; its text says on what, and what to do."""

    def __init__(self, what: str, remedy: str = PLAIN_VALUE) -> None:
        super().__init__(f"{what}. {remedy}")


def refuse_outside(module: str, told: str) -> None:
    """Refuse what Python or a package has to look at the machine with; `told` is its name."""
    outside = {module, module.partition(".")[0]} & _OUTSIDE
    if outside and told not in _HARMLESS and home_of(module) == "python":
        raise Unidentified(f"{told}, which may differ from job to job", FROM_THE_RECORD)
    if told.rpartition(".")[2] in OUTSIDE_ATTRIBUTES or _READERS.fullmatch(told):
        raise Unidentified(f"{told}, which may read more than the record", FROM_THE_RECORD)
