"""Measure an earlier version of the package and this one in turn: commands, the start of a job, its steps.

::

    python scripts/same_speed.py                            # five rounds, against the tag before-core
    python scripts/same_speed.py --before main --rounds 3   # against another revision

A machine that does something else shows in both columns, but not equally: look at the best, and measure on an idle one.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from same_bits import BEFORE, DIGITS, ROOT, TASKS, assert_imported, environment, unpack

HELP = 5
SETTLED = 0.2
"""The part of the steps at the beginning that is not measured."""
JOBS: dict[str, dict[str, Any]] = {
    "tiny MLP, 1 worker": {"task": f"{TASKS.name}:Small", "workers": 1, "lanes": 2, "batch_size": 24, "steps": 4000},
    "tiny MLP, 2 workers": {"task": f"{TASKS.name}:Small", "workers": 2, "lanes": 2, "batch_size": 24, "steps": 4000},
    "CNN, 2 workers": {"task": f"{DIGITS.name}:Digits", "workers": 2, "lanes": 4, "batch_size": 64, "steps": 300},
}
Figures = dict[str, list[float]]


def main() -> int:
    """Measure in turn, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", default=BEFORE, metavar="REV", help=f"the revision to compare with ({BEFORE})")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-speed-") as folder:
        before = Path(folder) / "before"
        unpack(options.before, before)
        measured: dict[Path, Figures] = {before: defaultdict(list), ROOT: defaultdict(list)}
        for tree in measured:
            assert_imported(tree)
        for number in range(options.rounds):
            # What comes second finds the machine warmer: they change places.
            for tree in sorted(measured, reverse=bool(number % 2)):
                measure(tree, Path(folder) / "jobs", measured[tree])
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    first, second = measured[before], measured[ROOT]
    print(f"{'milliseconds':<34}{options.before:>12}{'now':>10}{'best':>8}{'median':>8}")
    for name, earlier in first.items():
        best, median = (of(second[name]) / of(earlier) for of in (min, statistics.median))
        print(f"{name:<34}{min(earlier) * 1e3:>12.3f}{min(second[name]) * 1e3:>10.3f}{best:>8.3f}{median:>8.3f}")
    return 0


def measure(tree: Path, folder: Path, figures: Figures) -> None:
    """One round of a tree's: its figures, in seconds, go to the others."""
    figures["quorate --help"].append(min(seconds_of_help(tree) for _ in range(HELP)))
    for name, keys in JOBS.items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for source in (TASKS, DIGITS):
            shutil.copy(source, folder)
        # No evaluation and no checkpoint in between.
        job = {"version": 2, "name": "speed", "seed": 5, "runs": "runs", "evaluate": {"every": 10**6}, **keys}
        (folder / "job.yaml").write_text(json.dumps(job))
        began = time.time()
        command(tree, folder, "train", "job.yaml", "--quiet")
        events = [json.loads(line) for line in next(folder.glob("runs/*/events.jsonl")).read_text().splitlines()]
        steps = [event["time"] for event in events if event["kind"] == "step"]
        figures[f"{name}: to the first step"].append(steps[0] - began)
        settled = steps[int(len(steps) * SETTLED) :]
        figures[f"{name}: a step"].append((settled[-1] - settled[0]) / (len(settled) - 1))


def seconds_of_help(tree: Path) -> float:
    """How long `quorate --help` takes."""
    began = time.perf_counter()
    command(tree, tree, "--help")
    return time.perf_counter() - began


def command(tree: Path, folder: Path, *words: str) -> None:
    """A command of a tree's, which has to succeed."""
    subprocess.run(
        [sys.executable, "-m", "quorate", *words], cwd=folder, env=environment(tree), capture_output=True, check=True
    )


if __name__ == "__main__":
    sys.exit(main())
