"""Two functions that may make something else of a record are told apart, and what cannot be told is not cached."""

import enum
import functools
import importlib
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import quorate
from quorate.data.shards.caching import code_identity, installed
from quorate.data.shards.caching.code_identity import identity
from quorate.data.shards.caching.unidentified import Unidentified


def scaled(record: str, scale: float) -> float:
    return len(record) * scale


class Scaler:
    kept: Any = None

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def method(self, record: str) -> float:
        return len(record) * self.scale  # type: ignore[no-any-return]

    def __call__(self, record: str) -> float:
        return self.method(record)


class Cut(NamedTuple):
    size: int


@dataclass
class Options:
    size: int


class Slotted:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class Pictures(quorate.Task):
    def __init__(self, size: int) -> None:
        self.size = size

    def decode(self, record: str) -> str:
        return record[: self.size]


def closed_over(scale: Any) -> Any:
    return lambda record: len(record) * scale


def with_default(scale: Any) -> Any:
    def decode(record: str, by: Any = scale) -> Any:
        return len(record) * by

    return decode


def inner(scale: Any) -> Any:
    def decode(record: str) -> Any:
        return [(lambda: len(each) * scale)() for each in record]

    return decode


def with_class(scale: Any) -> Any:
    class Made:
        size = scale

    return lambda record: len(record) * Made.size


def decorated(scale: float) -> Any:
    return torch.no_grad()(closed_over(scale))


MAKERS: dict[str, Callable[[int], Any]] = {
    "partial": lambda size: functools.partial(scaled, scale=size),
    "closure": closed_over,
    "default": with_default,
    "inner": inner,
    "class attribute": with_class,
    "decorated": decorated,
    "method": lambda size: Scaler(size).method,
    "object": Scaler,
    "object inside": lambda size: Scaler(Scaler(size)),
    "named tuple": lambda size: closed_over(Cut(size)),
    "dataclass": lambda size: closed_over(Options(size)),
    "slots": lambda size: closed_over(Slotted(size)),
    "list": lambda size: closed_over([1, [size]]),
    "dict": lambda size: closed_over({"a": {"b": size}}),
    "set": lambda size: closed_over({"a", size}),
    "array": lambda size: closed_over(numpy.arange(size)),
    "tensor": lambda size: closed_over(torch.arange(size)),
    "module": lambda size: torch.nn.Upsample(scale_factor=size),
    "enum": lambda size: closed_over(enum.Enum("Color", {"RED": size}, module=__name__).RED),  # type: ignore[attr-defined]
    "cached": lambda size: functools.lru_cache(closed_over(size)),
    "path": lambda size: closed_over(Path(f"a{size}")),
    "method of a task": lambda size: Pictures(size).decode,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_functions_that_make_something_else_are_told_apart(make: Any) -> None:
    assert identity(make(2)).digest == identity(make(2)).digest
    assert identity(make(2)).digest != identity(make(3)).digest
    assert identity(make(2)).difference(identity(make(3))) != "nothing"


# --- modules

HELPERS = "import os\nSIZE = int(os.environ['SIZE'])\ndef resize(text): return text[:SIZE]\nclass Cut:\n    at = SIZE\n"
USES = {
    "a global of a helper": "from helpers import resize\ndef decode(r): return resize(r)",
    "an attribute of a module": "import helpers\ndef decode(r): return r[:helpers.SIZE]",
    "a function of a module": "import helpers\ndef decode(r): return helpers.resize(r)",
    "an attribute of a class": "from helpers import Cut\ndef decode(r): return r[:Cut.at]",
    "a global in a lambda": "from helpers import SIZE\ndef decode(r): return (lambda: r[:SIZE])()",
    "a global in a class inside": (
        "from helpers import SIZE\ndef decode(r):\n    class A:\n        n = 1\n        m = n + SIZE\n    return A.m"
    ),
    "a method": "from helpers import resize\nclass D:\n    def __call__(self, r): return resize(r)\ndecode = D()",
    "a base class": "from helpers import Cut\nclass D(Cut):\n    def __call__(self, r): return r\ndecode = D()",
    "a map": "from helpers import resize\nBY = {'cut': resize}\ndef decode(r): return BY['cut'](r)",
    "a cycle": (
        "from helpers import SIZE\ndef even(r): return not r or odd(r[1:])\n"
        "def odd(r): return bool(r) and len(r) < SIZE and even(r[1:])\ndecode = even"
    ),
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], Any]]:
    """decode() of a task that is loaded anew, with the size in the environment."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "helpers.py").write_text(HELPERS)

    def load(source: str, size: int = 1) -> Any:
        (tmp_path / "decoding.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("SIZE", str(size))
        for name in ("helpers", "decoding"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        installed._digest.cache_clear()
        return importlib.import_module("decoding").decode

    yield load
    for name in ("helpers", "decoding"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("source", USES.values(), ids=USES)
def test_what_the_environment_has_set_in_another_module_is_seen(source: str, modules: Any) -> None:
    assert identity(modules(source, 1)).digest == identity(modules(source, 1)).digest
    assert identity(modules(source, 1)).digest != identity(modules(source, 2)).digest


def test_a_function_that_is_edited_is_another(modules: Any) -> None:
    source = "def other(r): return r\ndef decode(r): return other(r)"
    assert identity(modules(source)).digest != identity(modules(source.replace("return r\n", "return r[1:]\n"))).digest


UNIDENTIFIED = {
    "os.environ": "import os\ndef decode(r): return os.environ['SIZE']",
    "os.getenv": "import os\ndef decode(r): return os.getenv('SIZE')",
    "the variable environ": "from os import environ\ndef decode(r): return environ['SIZE']",
    "time.time": "import time\ndef decode(r): return time.time()",
    ".now in decode": "from datetime import datetime\ndef decode(r): return datetime.now()",
    ".today in decode": "import datetime\ndef decode(r): return datetime.date.today()",
    "datetime.utcnow, which": "import datetime\nNOW = datetime.datetime.utcnow\ndef decode(r): return NOW()",
    "time.monotonic": "from time import monotonic\ndef decode(r): return monotonic()",
    ".fromfile, which": "from numpy import fromfile\ndef decode(r): return fromfile(r)",
    "truetype": "from PIL.ImageFont import truetype\ndef decode(r): return truetype(r)",
    "h5py.*File, which": "import h5py\ndef decode(r): return h5py.File(r)",
    "pyarrow.*read_table": "from pyarrow import parquet\ndef decode(r): return parquet.read_table(r)",
    "pyarrow.*read_csv": "from pyarrow.csv import read_csv\ndef decode(r): return read_csv(r)",
    "posixpath.exists|os.path.exists": "import os\ndef decode(r): return os.path.exists(r)",
    r"open\(\) in decode": "def decode(r): return open(r).read()",
    "read_text": "from pathlib import Path\nHERE = Path('.')\ndef decode(r): return HERE.read_text()",
    "which it changes itself": "N = 0\ndef decode(r):\n    global N\n    N += 1\n    return N",
    "which is not there yet": "def decode(r): return later",
    "the module helpers, which decode imports": "def decode(r):\n    import helpers\n    return helpers.SIZE",
    "the module helpers as a whole": "import helpers\ndef decode(r): return getattr(helpers, 'SIZE')",
    r"the variable RNG \(a Random\)": "import random\nRNG = random.Random(1)\ndef decode(r): return RNG.random()",
    r"the variable RNG \(a Generator\)": "import torch\nRNG = torch.Generator()\ndef decode(r): return RNG",
    r"the variable LINES \(a": "LINES = iter([1])\ndef decode(r): return next(LINES)",
    r"\(a lock\)": "import threading\nLOCK = threading.Lock()\ndef decode(r):\n    with LOCK: return r",
}


@pytest.mark.parametrize("text", UNIDENTIFIED)
def test_what_may_change_unseen_is_named(text: str, modules: Any) -> None:
    decode = modules(UNIDENTIFIED[text])
    with pytest.raises(Unidentified, match=text):
        identity(decode)


def test_a_lock_in_an_object_is_named_by_its_attribute() -> None:
    with pytest.raises(Unidentified, match=r"scale of a Scaler \(a lock\), which cannot be looked into"):
        identity(Scaler(threading.Lock()))


@pytest.mark.parametrize("value", [random.Random(1), numpy.random.default_rng(1), torch.Generator(), iter([1])])
def test_sources_of_numbers_of_ones_own_are_not_looked_into(value: Any) -> None:
    with pytest.raises(Unidentified, match="the variable scale"):
        identity(closed_over(value))


HARMLESS = """
    import io, json, logging, os, re, struct
    from collections import Counter, OrderedDict
    import numpy as np, torch
    from torch.nn import functional

    log = logging.getLogger(__name__)
    WORD, HEAD, NAMES = re.compile("a+"), torch.float32, OrderedDict(a=1)

    def decode(record):
        log.debug("one more")
        name, _ = os.path.splitext(record["name"])
        array = np.load(io.BytesIO(record["npy"]))
        import base64, PIL.Image
        picture = PIL.Image.open(io.BytesIO(base64.b64decode(record["jpg"]))).convert("RGB")
        try:
            number = struct.unpack("<I", record["n"])[0] if WORD.match(name) else len(Counter(name))
        except (ValueError, struct.error) as error:
            raise ValueError(f"bad: {error}") from None
        return functional.relu(torch.from_numpy(array).to(HEAD)), NAMES.get(name), json.loads(record["json"]), number
"""


def test_usual_code_is_identified_the_same_in_every_process(modules: Any, tmp_path: Path) -> None:
    here = identity(modules(HARMLESS))
    names = " ".join(here.parts)
    assert "the module base64" in names
    script = (
        "import decoding, quorate.data.shards.caching.code_identity as it; print(it.identity(decoding.decode).digest)"
    )
    path = os.pathsep.join([str(Path(quorate.__file__).parents[1]), str(tmp_path)])
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == here.digest


def test_versions_of_packages_and_of_what_they_need_count(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = modules("import PIL.Image\ndef decode(r): return PIL.Image.new('L', (1, 1))")
    before = identity(decode)
    assert "pillow" in str(installed.version_of("PIL"))
    assert "filelock" in str(installed.version_of("torch")), "what it needs"
    monkeypatch.setattr(code_identity, "version_of", lambda module: f"{module} 2")
    assert identity(decode).digest != before.digest


def test_the_processor_and_the_default_type_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(scaled).digest
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANCIENT")
        assert identity(scaled).digest != before
    torch.set_default_dtype(torch.float64)
    try:
        assert identity(scaled).digest != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert identity(scaled).digest == before


def test_whose_a_module_is() -> None:
    expected = {"json": "python", "sys": "python", "torch.nn": "package", "no.such": "task", __name__: "task"}
    assert {name: installed.home_of(name) for name in expected} == expected
