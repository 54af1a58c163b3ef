"""The data benchmark: how fast samples come from files that do not fit into memory, and how much memory that takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import quorate
from benchmarks.row import Row, ratios_in_words
from benchmarks.size import size_in_words
from benchmarks.synthetic_shards import KINDS
from benchmarks.system import Needs, System, Turn
from quorate.core.errors import RequestError

QUORATE = System("quorate", "benchmarks.own.data", is_ours=True)
RAW = System("raw-decode", "benchmarks.peers.raw_decode_data")
DATALOADER = System("dataloader", "benchmarks.peers.dataloader_data")
STORE = System("quorate-store", "benchmarks.own.store_data", is_ours=True, needs=Needs(programs=("weed",)))
FOLDER = System("quorate-folder", "", is_ours=True)
"""The same job as that of the store, from a local folder: measured by the same script."""
SYSTEMS = (QUORATE, RAW, DATALOADER, STORE)

SIZE = 10 * 2**30
SMALLEST = 40 * 2**20
"""Less makes too few batches."""
PEERS_READ = 2**29
"""Bytes that a peer reads at most: a rate needs no more, while Quorate's memory is watched over all of it."""
FROM_STORE = 400 * 2**20
"""Bytes that are put into the store at most."""
DELAY_MS = 50
STEP_MS = 20
LOADERS = (0, 1)
FASHION_STEPS = 150
DIGITS, FASHION = "digits", "fashion-mnist"

_NEEDED = {"pyarrow": "parquet", "PIL": "pictures"}
_FASHION_PLACES = ("data/fashion-mnist", "/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Waiting:
    """An example whose steps are asked how long they wait for data, and where its data is, if it needs any."""

    name: str
    job: Path
    data: Path | None = None
    steps: int | None = None


def find_examples(fashion: Path | None) -> tuple[Waiting, ...]:
    """Those of a checkout, as far as their data is here; `fashion` is a folder to look for Fashion-MNIST in."""
    root = Path(quorate.__file__).resolve().parents[2]
    jobs = root / "examples"
    found = [Waiting(DIGITS, jobs / "digits.yaml")]
    places = [root / place for place in _FASHION_PLACES] if fashion is None else [fashion.absolute()]
    folder = next((place for place in places if place.is_dir()), None)
    if fashion is not None and folder is None:
        raise RequestError(
            f"--fashion: there is no folder {fashion}. python scripts/datasets.py fashion-mnist makes one."
        )
    if folder is not None:
        found.append(Waiting(FASHION, jobs / "fashion_mnist.yaml", folder, FASHION_STEPS))
    return tuple(each for each in found if each.job.is_file())


def check_packages() -> None:
    """Refuse where the shards could not even be made."""
    missing = [extra for module, extra in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise RequestError(f"the shards need packages that are not here: pip install 'quorate[{','.join(missing)}]'.")


def disk_needed(size: int) -> int:
    """Bytes that are on the disk at once at most: shards of both kinds, and twice what is put into the store."""
    return len(KINDS) * (size + 2 * min(size, FROM_STORE)) + 2**28


def case_of(kind: str, loaders: int) -> str:
    """Parquet, or tar with so many loaders."""
    return kind if not loaders else f"{kind}, {loaders} loader{'s' if loaders > 1 else ''}"


@dataclass(frozen=True)
class Data:
    """How large the data is, with how many loader processes it is read, and which examples are asked for waiting."""

    size: int = SIZE
    loaders: Sequence[int] = LOADERS
    systems: Sequence[System] = SYSTEMS
    examples: Sequence[Waiting] = ()
    name: str = "data"
    headline: str = (
        "A batch of 8,192 rows of Parquet, or of 256 pictures of tar files, read, shuffled and decoded by a job whose "
        "steps do next to nothing. Of raw is the speed against the same library alone in one thread. Memory is what "
        "the job takes above one without shards, grows what its last third takes more than its first. From the store, "
        f"each request takes {DELAY_MS} ms longer, and a step computes for {STEP_MS} ms. Of the examples, it is what a "
        "step waits for data."
    )

    def __post_init__(self) -> None:
        if self.size < SMALLEST:
            raise RequestError(
                f"--size: {size_in_words(self.size)} of data make too few batches. Give {size_in_words(SMALLEST)} or "
                "more."
            )

    def turns(self) -> list[Turn]:
        """Each system with each kind of shards; Quorate and the DataLoader with each number of loaders."""
        return [*self._feeding(), *self._from_store(), *self._waiting()]

    def label(self, row: Row) -> str:
        """The case."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With the share of the raw decode rate, where that was measured."""
        raw = {row.case: row.details["samples_per_second"] for row in rows if row.system == RAW.name}
        return [_against(row, raw.get(row.case.partition(",")[0])) for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """Speed, share of the raw rate, memory, waiting, and how the peers compare."""
        words = {
            "samples_per_second": ("samples/s", "{:,.0f}"),
            "of_raw_percent": ("of raw", "{:.0f} %"),
            "of_folder_percent": ("of folder", "{:.0f} %"),
            "memory_mb": ("memory", "{:,.0f} MB"),
            "growth_mb": ("grows", "{:,.0f} MB"),
            "waiting_percent": ("waiting", "{:.2f} %"),
        }
        told = {word: form.format(row.details[name]) for name, (word, form) in words.items() if name in row.details}
        return told | {peer: ratio for peer, ratio in ratios_in_words(row).items() if peer == DATALOADER.name}

    def _feeding(self) -> list[Turn]:
        turns: list[Turn] = []
        common: dict[str, Any] = {"size": self.size, "most": PEERS_READ}
        for kind in KINDS:
            for loaders in self.loaders:
                case = case_of(kind, loaders)
                order = common | {"kind": kind, "case": case, "loaders": loaders}
                turns += [Turn(each, case, order) for each in (QUORATE, DATALOADER) if each in self.systems]
            if RAW in self.systems:
                turns.append(Turn(RAW, kind, common | {"kind": kind, "case": kind}))
        return turns

    def _from_store(self) -> list[Turn]:
        if STORE not in self.systems:
            return []
        size = min(self.size, FROM_STORE)
        return [
            Turn(
                STORE,
                f"{kind} from a store",
                {
                    "kind": kind,
                    "case": f"{kind} from a store",
                    "size": size,
                    "delay_ms": DELAY_MS,
                    "step_ms": STEP_MS,
                },
                also=(FOLDER,),
            )
            for kind in KINDS
        ]

    def _waiting(self) -> list[Turn]:
        if QUORATE not in self.systems:
            return []
        return [
            Turn(
                QUORATE,
                example.name,
                {
                    "case": example.name,
                    "job": str(example.job),
                    "data": None if example.data is None else str(example.data),
                    "steps": example.steps,
                },
            )
            for example in self.examples
        ]


def _against(row: Row, raw: float | None) -> Row:
    if not raw or row.system == RAW.name or row.case.endswith("store"):
        return row
    return row.with_details(of_raw_percent=row.details["samples_per_second"] / raw * 100)
