"""Let an earlier version of the package train, answer and tell its surface, and keep what it wrote in tests/fixtures.

::

    python scripts/make_fixtures.py [--before REV]     # the tag before-core

The task and the test that asks the present version the same stay as they are: `tests/written_before.py` says what is
asked. Nothing that is written names this machine, its folders or its user.
"""

import argparse
import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file
from same_bits import BEFORE, ROOT, assert_imported, environment, finished, start, unpack

sys.path.insert(0, str(ROOT / "tests"))
from written_before import (
    ANSWERS,
    FIXTURES,
    HERE,
    KEY,
    QUESTIONS,
    RUNS,
    STORED,
    SURFACE,
    WRITTEN,
    export_of,
    lay_out,
    leaves,
)

PLACE = Path(tempfile.gettempdir()) / "quorate-fixtures"
"""Where it is trained: what it wrote names this folder, which is not there when it is read."""
TASK = "task.py"
USUAL: dict[str, Any] = {
    "version": 2,
    "task": f"{TASK}:Exact",
    "lanes": 2,
    "workers": 2,
    "batch_size": 4,
    "steps": 6,
    "evaluate": {"every": 3, "metric": "mean"},
    "checkpoint": {"every": 3},
}
JOBS: dict[str, dict[str, Any]] = {
    "ring": {},
    "servers": {"strategy": {"kind": "parameter-server", "servers": 2, "replicas": 1}},
    "fsdp": {"strategy": {"kind": "fsdp"}},
    "encrypted": {"encrypt": True, "checkpoint": {"every": 3, "encrypt": {"key_env": next(iter(KEY))}}},
    "killed": {"params": {"kill": True}, "steps": 12},
    "copied": {"checkpoint": {"every": 3, "to": ["checkpoints", str(PLACE / "stored")]}},
}
SEARCH = {
    "version": 1,
    "name": "search",
    "job": "ring.yaml",
    "metric": "mean",
    "mode": "min",
    "space": {"params.learning_rate": {"grid": [0.25, 0.5]}},
    "algorithm": "grid",
    "concurrent": 1,
    "trial": {"workers": 1},
}
LEFT_OUT = ("*.status", "report.*", "lock", "__pycache__")
"""Pages of memory with the pids of processes; reports, which are drawn again; whose turn it was."""
LOGS_OF = "servers-0001"
"""The only run whose logs are asked for."""
LARGEST = 250_000


def main() -> int:
    """Train, answer, check what was written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", default=BEFORE, metavar="REV", help=f"the revision that writes ({BEFORE})")
    options = parser.parse_args()
    os.environ.update(KEY)
    with tempfile.TemporaryDirectory(prefix="make-fixtures-") as folder:
        tree = Path(folder) / "before"
        unpack(options.before, tree)
        assert_imported(tree)
        PLACE.mkdir()
        try:
            write(tree)
            keep()
        finally:
            shutil.rmtree(PLACE)
        ANSWERS.write_text(json.dumps(answers(tree, Path(folder)), indent=0, sort_keys=True) + "\n")
        SURFACE.write_text(surface(tree))
    return checked()


def write(tree: Path) -> None:
    """Train the jobs and the search."""
    shutil.copy(WRITTEN / TASK, PLACE)
    (PLACE / "stored").mkdir()
    for name, keys in JOBS.items():
        (PLACE / f"{name}.yaml").write_text(as_yaml(USUAL | {"name": name} | keys))
        finished(start(tree, PLACE, "train", f"{name}.yaml", "--json"))
    assert (PLACE / "killed").exists(), "nobody was killed"
    shutil.rmtree(PLACE / "runs" / "copied-0001")
    (PLACE / "search.yaml").write_text(as_yaml(SEARCH))
    finished(start(tree, PLACE, "tune", "search.yaml", "--json"))


def as_yaml(fields: dict[str, Any]) -> str:
    """One key a line, as in a file that is written by hand."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())


def keep() -> None:
    """Put what was written in place of what is kept, without what names this machine."""
    shutil.rmtree(WRITTEN)
    shutil.copytree(PLACE, WRITTEN, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for logs in [*WRITTEN.rglob("logs")]:
        if logs.parent.name != LOGS_OF:
            shutil.rmtree(logs)
    (WRITTEN / "runs").rename(WRITTEN / "written")  # `runs` is not for the repository
    host = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
    for file in [*WRITTEN.rglob("*.jsonl"), *WRITTEN.rglob("result.json")]:
        file.write_text(host.sub("host", file.read_text()))


def answers(tree: Path, folder: Path) -> dict[str, Any]:
    """What it answers about them elsewhere: only what is the same a while later, with files of another time."""
    asked = []
    for name in ("first", "second"):
        place = folder / name / "project"
        place.mkdir(parents=True)
        lay_out(place)
        asked.append(ask(tree, place))
        time.sleep(1.1)  # until ages differ
    first, second = asked
    return {
        question: {path: value for path, value in told.items() if second[question].get(path, HERE) == value}
        for question, told in first.items()
    }


def ask(tree: Path, place: Path) -> dict[str, dict[str, Any]]:
    """All questions, and the weights of each run."""
    told = {}
    for question, words in QUESTIONS.items():
        told[question] = dict(leaves(finished(start(tree, place, *words, "--json")), place))
    for run in RUNS:
        finished(start(tree, place, *export_of(run), "--json"))
        told[f"export {run}"] = {name: each.tolist() for name, each in load_file(place / "weights.safetensors").items()}
    return told


def surface(tree: Path) -> str:
    """What users of it can name."""
    command = [sys.executable, str(ROOT / "tests/written_before.py")]
    return subprocess.run(command, env=environment(tree), stdout=subprocess.PIPE, text=True, check=True).stdout


def checked() -> int:
    """Whether it is small, and names neither this machine nor its folders nor its user."""
    files = [file for file in FIXTURES.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    words = {socket.gethostname(), getpass.getuser(), str(Path.home()), str(ROOT), sys.prefix}
    naming = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words).encode())
    found = [f"{file}: {match.group().decode()}" for file in files for match in naming.finditer(file.read_bytes())]
    print(f"{len(files)} files, {size:,} bytes, {STORED} among them", *found, sep="\n")
    return int(bool(found) or size > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
