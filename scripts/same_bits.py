"""Train small jobs with an earlier version of the package and with this one, and compare what they come to.

::

    python scripts/same_bits.py                        # all cases, against the tag before-core
    python scripts/same_bits.py --before main ring-3   # one case, against another revision

Rings and servers have to come to the same bits; gangs, whose last bits may differ, to the same weights within 1e-9. The
exit code is 1 if one does not.
"""

import argparse
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "tests/same_bits_tasks.py"
DIGITS = ROOT / "examples/digits.py"
SOURCES = (TASKS, DIGITS)
BEFORE = "before-core"
CLOSE = 1e-9
PATIENCE = 300.0
COMPARED = ("status", "steps", "weights_digest", "final_metrics", "best")
AT_ONCE = 2


class DifferenceError(Exception):
    """A case could not be trained, or its fault did not happen."""


@dataclass(frozen=True)
class Case:
    """A job, and how near both versions have to come."""

    name: str
    task: str
    keys: dict[str, Any]
    gang: bool = False
    kills: str = ""
    """Who is killed: a worker, or everybody."""

    def job(self) -> dict[str, Any]:
        """The content of its job file."""
        usual = {"version": 2, "name": "same", "lanes": 4, "batch_size": 24, "seed": 5, "runs": "runs"}
        return usual | {"task": self.task} | self.keys


@dataclass
class Outcome:
    """What a version came to."""

    document: dict[str, Any]
    weights: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def compared(self) -> dict[str, Any]:
        """What has to be equal, without the folder's path and times."""
        return {name: self.document.get(name) for name in COMPARED}


RICH = {"schedule": {"kind": "cosine", "warmup": 4}, "clip_norm": 0.5, "last_batch": "keep"}
SERVERS = {"kind": "parameter-server", "servers": 2}
EVALUATED = {"every": 3, "metric": "loss", "mode": "min"}
CASES = (
    Case("ring-1", "digits.py:Digits", {"batch_size": 64, "steps": 12, "workers": 1}),
    Case("ring-3", "digits.py:Digits", {"batch_size": 64, "steps": 12, "workers": 3, "checkpoint": {"every": 5}}),
    Case("rich", f"{TASKS.name}:Normed", {"epochs": 3, "workers": 2, "average": {"decay": 0.9}, **RICH}),
    Case("accumulate", f"{TASKS.name}:Normed", {"steps": 15, "workers": 2, "accumulate": 2, "links": "tcp"}),
    Case("bf16", f"{TASKS.name}:Small", {"steps": 15, "workers": 2, "precision": "bf16"}),
    Case(
        "early-stop",
        f"{TASKS.name}:Small",
        {
            "epochs": 40,
            "workers": 2,
            "params": {"learning_rate": 1.0},
            "evaluate": EVALUATED,
            "early_stop": {"metric": "loss", "patience": 3},
        },
    ),
    Case("own-loop", f"{TASKS.name}:own_loop", {"epochs": 3, "workers": 2}),
    Case("servers", f"{TASKS.name}:Normed", {"steps": 15, "workers": 2, "strategy": SERVERS, **RICH}),
    Case(
        "servers-top-k",
        f"{TASKS.name}:Small",
        {"steps": 15, "workers": 2, "strategy": SERVERS | {"compress": {"top_k": 0.2}}},
    ),
    Case(
        "ring-top-k",
        f"{TASKS.name}:Small",
        {"steps": 15, "workers": 3, "strategy": {"kind": "ring", "compress": {"top_k": 0.2}}},
    ),
    Case("ddp", f"{TASKS.name}:Exact", {"steps": 15, "workers": 2, "strategy": {"kind": "ddp"}}, gang=True),
    Case("fsdp", f"{TASKS.name}:Exact", {"steps": 15, "workers": 2, "strategy": {"kind": "fsdp"}}, gang=True),
    Case(
        "killed-worker",
        f"{TASKS.name}:Killed",
        {"steps": 20, "workers": 3, "checkpoint": {"every": 4}},
        kills="worker",
    ),
    Case(
        "killed-and-resumed",
        f"{TASKS.name}:Killed",
        {"steps": 20, "workers": 2, "params": {"everybody": True}, "checkpoint": {"every": 4}},
        kills="everybody",
    ),
)


def main() -> int:
    """Train, compare, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", default=BEFORE, metavar="REV", help=f"the revision to compare with ({BEFORE})")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(case.name for case in CASES))
    options = parser.parse_args()
    unknown = set(options.cases) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in CASES)}")
    chosen = [case for case in CASES if not options.cases or case.name in options.cases]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        before = Path(folder) / "before"
        unpack(options.before, before)
        for tree in (before, ROOT):
            assert_imported(tree)
        return compared(chosen, {"before": before, "after": ROOT}, Path(folder), options.before)


def unpack(revision: str, tree: Path) -> None:
    """The package as it was."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "src"], capture_output=True, check=False
    )
    if found.returncode:
        sys.exit(
            f"There is no revision {revision!r} here ({found.stderr.decode().strip()}). Fetch it (git fetch --tags), "
            f"set it (git tag {revision} COMMIT), or name another with --before."
        )
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(tree, filter="data")


def assert_imported(tree: Path) -> None:
    """The package of this tree is the one that is imported, not one that is installed."""
    told = subprocess.run(
        [sys.executable, "-c", "import quorate; print(quorate.__file__)"],
        env=environment(tree),
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    if not Path(told.stdout.strip()).is_relative_to(tree / "src"):
        sys.exit(f"{told.stdout.strip()} is imported instead of {tree / 'src'}: nothing would be shown.")


def environment(tree: Path) -> dict[str, str]:
    """That of a command of this tree's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUORATE_")}
    return kept | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": ""}


def compared(cases: list[Case], trees: dict[str, Path], folder: Path, revision: str) -> int:
    """Train the cases with each tree, and print how far they are apart."""
    print(f"{'case':<20}{'before':>8}{'after':>8}  {revision} and this tree")
    differs = False
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {
            case.name: {
                name: pool.submit(attempt, case, tree, folder / "jobs" / case.name / name)
                for name, tree in trees.items()
            }
            for case in cases
        }
        for case in cases:
            before, after = (asked[case.name][name].result() for name in trees)
            told, is_different = judge(case, before, after)
            differs = differs or is_different
            seconds = "".join(
                f"{each.seconds:>6.1f} s" if isinstance(each, Outcome) else f"{'-':>8}" for each in (before, after)
            )
            print(f"{case.name:<20}{seconds}  {told}", flush=True)
    return int(differs)


def judge(case: Case, before: Outcome | DifferenceError, after: Outcome | DifferenceError) -> tuple[str, bool]:
    """In words, and whether they differ."""
    for when, each in (("before", before), ("after", after)):
        if isinstance(each, DifferenceError):
            return f"FAILED {when}: {each}", True
    assert isinstance(before, Outcome) and isinstance(after, Outcome)
    first, second = before.compared, after.compared
    if case.gang:
        first, second = ({name: each[name] for name in ("status", "steps")} for each in (first, second))
        distance = far(before, after)
        if not distance <= CLOSE:
            return f"DIFFERS by {distance:.1e}, more than {CLOSE:.0e}", True
        equal = f"equal within {CLOSE:.0e} ({distance:.1e})"
    else:
        equal = f"same bits {before.document['weights_digest'][:12]}"
    different = [name for name in first if first[name] != second[name]]
    if different:
        return "DIFFERS: " + "; ".join(f"{name} {first[name]} and {second[name]}" for name in different), True
    return equal, False


def far(before: Outcome, after: Outcome) -> float:
    """The largest relative distance of weights and metrics; infinite if they are not the same ones."""
    metrics = [each.document["final_metrics"] for each in (before, after)]
    if before.weights.keys() != after.weights.keys() or metrics[0].keys() != metrics[1].keys():
        return math.inf
    distances = [abs(metrics[0][name] - metrics[1][name]) / max(1.0, abs(metrics[0][name])) for name in metrics[0]]
    for name, first in before.weights.items():
        second = after.weights[name]
        if first.shape != second.shape or first.dtype != second.dtype:
            return math.inf
        distances.append(float((abs(first - second) / abs(first).clip(min=1.0)).max(initial=0.0)))
    return max((math.inf if math.isnan(each) else each for each in distances), default=math.inf)


def attempt(case: Case, tree: Path, folder: Path) -> Outcome | DifferenceError:
    """Train a case with a tree's package, in a folder of its own."""
    folder.mkdir(parents=True)
    for source in SOURCES:
        shutil.copy(source, folder)
    (folder / "job.yaml").write_text(json.dumps(case.job()))  # JSON is YAML, too
    began = time.monotonic()
    try:
        outcome = trained(case, lambda *words: start(tree, folder, *words), folder)
    except DifferenceError as error:
        return error
    outcome.seconds = time.monotonic() - began
    return outcome


def trained(case: Case, command: Callable[..., subprocess.Popen[str]], folder: Path) -> Outcome:
    """Train it, with its fault if it has one, and read its weights if their digest is not enough."""
    fault = folder / "fault"
    training = command("train", "job.yaml", "--json")
    if case.kills == "everybody":
        kill_all(training, fault)
        training = command("resume", "last", "--json")
    document = finished(training)
    if case.kills and not fault.exists():
        raise DifferenceError("nobody was killed, so nothing is shown")
    if case.kills == "worker" and not document["recoveries"]:
        raise DifferenceError("a worker was killed, and no recovery is told")
    outcome = Outcome(document)
    if case.gang:
        finished(command("checkpoints", "export", "last", "-o", "weights.safetensors", "--json"))
        outcome.weights = load_file(folder / "weights.safetensors")
    return outcome


def start(tree: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command of a tree's."""
    return subprocess.Popen(
        [sys.executable, "-m", "quorate", *words],
        cwd=folder,
        env=environment(tree),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The document of a command that has to succeed."""
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        end(process)
        raise DifferenceError(f"no end within {PATIENCE:.0f} s") from None
    if process.returncode:
        raise DifferenceError(f"exit code {process.returncode}: {stderr.strip()[-500:]}")
    document: dict[str, Any] = json.loads(stdout)
    return document


def kill_all(process: subprocess.Popen[str], fault: Path) -> None:
    """Kill a launcher and all its processes, as soon as a worker waits for it."""
    over = time.monotonic() + PATIENCE
    while not fault.exists():
        if process.poll() is not None or time.monotonic() > over:
            end(process)
            raise DifferenceError(f"it ended before it could be killed: {process.communicate()[1].strip()[-500:]}")
        time.sleep(0.02)
    end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill it with its children, and wait until they are gone."""
    everybody: list[psutil.Process] = []
    try:
        launcher = psutil.Process(process.pid)
        everybody = [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        pass
    for each in everybody:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(everybody, timeout=PATIENCE)


if __name__ == "__main__":
    sys.exit(main())
