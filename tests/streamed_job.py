"""Jobs on shards by the real command: what they read, and how they are played in parts, each under its own faults."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy
import pyarrow as pa
from pyarrow import parquet

from command import PATIENCE, Done, Workplace
from quorate.chaos.script import firings, parse_fault
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index
from quorate.storage.run_folder import RunFolder
from schemas import validate

SOURCE = (Path(__file__).parent / "streamed_task.py").read_text()
ENDINGS = {"tar": "tar", "parquet": "parquet", "jsonl": "jsonl", "text": "txt", "hdf5": "h5"}
SIZES = (9, 5, 12, 7, 9, 8, 11, 6, 10, 7, 9, 7)
SAMPLES, STEPS_AN_EPOCH, EPOCHS = sum(SIZES), 8, 3
KEYS: dict[str, Any] = {
    "task": "task.py:Streamed",
    "workers": 1,
    "batch_size": 12,
    "steps": None,
    "epochs": EPOCHS,
    "seed": 3,
    "failure_timeout": 5.0,
    "evaluate": {"every": 5},
    "checkpoint": {"every": 2, "keep": 3},
}


def keys_of(kind: str, **keys: Any) -> dict[str, Any]:
    """Of a job on shards of a kind."""
    return {**KEYS, "params": {"kind": kind}, **keys}


def write_data(kind: str, folder: Path) -> None:
    """Shards for training and for validation, each with its index."""
    write_set(kind, folder / "train", SIZES)
    write_set(kind, folder / "validation", (6, 7), seed=1)


def write_set(kind: str, folder: Path, sizes: Sequence[int], seed: int = 0) -> None:
    """Shards in a folder, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = numpy.random.default_rng(seed)
    for number, size in enumerate(sizes):
        write_shard(kind, folder / f"shard-{number:03d}.{ENDINGS[kind]}", chance, size)
    save_index(build_index(str(folder)), folder / NAME)


def write_shard(kind: str, file: Path, chance: numpy.random.Generator, size: int) -> None:
    inputs = chance.standard_normal((size, 3)).astype(numpy.float32)
    targets = inputs.sum(axis=1)
    if kind == "parquet":
        columns = pa.FixedSizeListArray.from_arrays(pa.array(inputs.reshape(-1)), 3)
        parquet.write_table(pa.table({"x": columns, "y": pa.array(targets)}), file, row_group_size=5)
    elif kind == "hdf5":
        with h5py.File(file, "w") as opened:
            opened["x"], opened["y"] = inputs, targets
    elif kind == "tar":
        with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as archive:
            for row in range(size):
                for name, content in (("x", inputs[row].tobytes()), ("y", str(targets[row]).encode())):
                    member = tarfile.TarInfo(f"{row:04d}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    else:
        rows = zip(inputs.tolist(), targets.tolist(), strict=True)
        lines = [json.dumps({"x": x, "y": y}) if kind == "jsonl" else " ".join(map(str, (y, *x))) for x, y in rows]
        file.write_text("".join(f"{line}\n" for line in lines))


# --- parts of a run

PLAY = """
import json
import os
import sys
from pathlib import Path

from quorate.api import session
from quorate.api.train import show_quietly
from quorate.chaos.supervisor_hook import run_under
from quorate.core.errors import QuorateError
from quorate.spec.load import load_job
from quorate.spec.override import parse_set
from quorate.chaos.script import parse_fault
from quorate.chaos.supervisor_hook import run_under

run, settings, faults = json.loads(sys.argv[1])
overrides, script = [parse_set(each) for each in settings], tuple(map(parse_fault, faults))
try:
    if run is None:
        session.start(load_job(Path("job.yaml"), os.environ, overrides), show_quietly, run_under(script))
    else:
        session.resume(Path("runs"), run, os.environ, overrides, watch=show_quietly, runner=run_under(script))
except QuorateError as error:
    print(f"error: {error.message}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Played:
    """A run that is started, and taken up again, each time on other workers and under more faults."""

    def __init__(self, place: Workplace, **environment: str) -> None:
        self._place = place
        self._environment = environment
        self._script = place.temporary / "play.py"
        self._script.write_text(PLAY)
        # All of them, in every part: a fault is known by its place in the script, and those that came stay away.
        self._faults: list[str] = []
        self._run: str | None = None

    def part(self, *faults: str, workers: int, settings: Sequence[str] = (), **environment: str) -> Done:
        """Start the run or, later on, go on with it; until it ends, or its launcher is killed."""
        self._faults += faults
        given = json.dumps([self._run, [f"workers={workers}", *settings], self._faults])
        process = subprocess.run(
            [sys.executable, str(self._script), given],
            cwd=self._place.folder,
            env=os.environ | {"TMPDIR": str(self._place.temporary)} | self._environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        self._place.assert_nobody_left()
        self._run = self._place.last.name
        return Done(process.returncode, process.stdout, process.stderr)

    @property
    def missed(self) -> list[str]:
        """The faults that have not come about."""
        came = {firing.fault for firing in firings(RunFolder(self._place.last).logs)}
        return [fault for number, fault in enumerate(self._faults) if number not in came]

    def met(self) -> list[tuple[str, str]]:
        """Each fault, and the phase in which it was met."""
        came = firings(RunFolder(self._place.last).logs)
        return [(str(parse_fault(self._faults[firing.fault])), firing.phase) for firing in came]


def begun_at(place: Workplace) -> list[int]:
    """From which step each part of the newest run has gone on."""
    begun: list[int] = []
    for event in place.events():
        if event["kind"] == "run" and event["from_step"] not in begun[-1:]:
            begun.append(event["from_step"])
    return begun


def assert_whole(place: Workplace, *, bad: Sequence[int] = (), epochs: int = EPOCHS) -> dict[str, Any]:
    """`quorate show --ledger` says that each sample was read exactly once in every epoch, but for the bad ones."""
    done = place.run("show", "last", "--ledger", "--json")
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    validate("show", done.document)
    ledger: dict[str, Any] = done.document["ledger"]
    assert ledger["whole"]
    assert ledger["not_compared"] is None, "every step was held against the order of the job"
    assert [entry["status"] for entry in ledger["epochs"]] == ["whole"] * epochs
    for entry in ledger["epochs"]:
        read, dropped = entry["samples"], entry["dropped"]
        left_out = set(bad) - set(dropped)
        assert read + len(dropped) + len(left_out) == SAMPLES
        assert len(dropped) == SAMPLES % KEYS["batch_size"]
    return ledger
