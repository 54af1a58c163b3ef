"""Random faults upon several jobs, for as long as asked: ``make soak MINUTES=30``.

Each job is trained undisturbed once, and then again and again under faults of chance. After each run its weights and
its samples must be those of the undisturbed one, and nothing may be left of it: no process, no shared memory, no cable
of a network. It stops at the first thing that does not hold, keeps the folder, and says how to do it again.
"""

import argparse
import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASK = """
import time

import torch
import torch.nn.functional as F
from torch import nn

import quorate


def decode(record):
    return torch.tensor(record["inputs"]) + 0.01 * torch.rand(64), record["target"]


class Soaked(quorate.Task):
    pause: float = 0.005
    builds: float = 0.0
    convolves: bool = False
    streams: bool = False

    def model(self):
        time.sleep(self.builds)  # others may be lost while a replacement builds
        if not self.convolves:
            return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        picture = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        return nn.Sequential(picture, nn.Flatten(), nn.Linear(288, 4))

    def datasets(self):
        if self.streams:
            return quorate.Shards("shards", decode=decode, window=64)
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(1001, 64, generator=generator)
        samples = torch.utils.data.TensorDataset(inputs, torch.randint(0, 4, (1001,), generator=generator))
        if self.convolves:  # no columns, so that there is work for loaders
            samples = list(samples)
        return samples, torch.utils.data.Subset(samples, range(100))

    def loss(self, model, batch):
        time.sleep(self.pause)
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def metrics(self, model, batch):
        inputs, targets = batch
        return {"loss": F.cross_entropy(model(inputs), targets)}

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.003)
"""

USUAL: dict[str, Any] = {
    "task": "task.py:Soaked",
    "batch_size": 64,
    "failure_timeout": 3.0,
    "evaluate": {"every": 60},
    "checkpoint": {"every": 45, "keep": 3},
}
JOBS: dict[str, dict[str, Any]] = {
    "shared": {"lanes": 4, "workers": 3, "steps": 600},
    "slow-build": {"lanes": 4, "workers": 2, "steps": 400, "params": {"builds": 0.7}, "average": {"decay": 0.99}},
    "ring": {"lanes": 4, "workers": 3, "steps": 500, "links": "tcp"},
    "convolution": {"lanes": 6, "workers": 2, "steps": 400, "params": {"convolves": True}, "loader_workers": 1},
    "streamed": {"lanes": 6, "workers": 2, "steps": 400, "params": {"streams": True}, "loader_workers": 1},
    "alone": {"lanes": 4, "workers": 1, "steps": 900},
    "balanced": {"lanes": 8, "workers": 3, "steps": 400, "balance": "speed", "min_workers": 2},
}


@dataclass
class Soak:
    """A folder of jobs, and what has become of them."""

    folder: Path
    mean: str
    runs: int = 0
    faults: int = 0
    recoveries: int = 0

    def prepare(self) -> None:
        """Train every job undisturbed."""
        (self.folder / "task.py").write_text(TASK)
        write_shards(self.folder / "shards")
        self._quorate("data", "index", "shards").check_returncode()
        for name, keys in JOBS.items():
            (self.folder / f"{name}.json").write_text(json.dumps({"name": name, **USUAL, **keys}))
            done = self._quorate("train", f"{name}.json", "--json", "--quiet")
            if done.returncode != 0:
                raise SystemExit(f"{name} fails undisturbed:\n{done.stderr}")

    def disturb(self, name: str, seed: int) -> None:
        """Train a job once more, under the faults of a seed."""
        command = ["chaos", f"{name}.json", "--random", "--mtbf", self.mean, "--seed", str(seed)]
        began = time.monotonic()
        done = self._quorate(*command, "--against", f"{name}-0001", "--json", "--quiet")
        again = f"cd {self.folder} && quorate {shlex.join(command)}"
        if "before the first fault" in done.stderr:  # chance has it so for some seeds; the next one has other faults
            print(f"{name:12} seed {seed:<5}   no faults", flush=True)
            return
        if done.returncode != 0:
            raise SystemExit(f"{name} departs under seed {seed}:\n{done.stdout}\n{done.stderr}\nagain: {again}")
        told = json.loads(done.stdout)
        shutil.rmtree(told["folder"])
        self.runs += 1
        self.faults += len(told["faults"])
        self.recoveries += len(told["recoveries"])
        print(f"{name:12} seed {seed:<5} {len(told['faults']):3} faults {time.monotonic() - began:6.1f} s", flush=True)
        if left := self.left_behind():
            raise SystemExit(f"{name} under seed {seed} has left behind: {', '.join(left)}\nagain: {again}")

    def left_behind(self) -> list[str]:
        """What should not be there any more."""
        deadline = time.monotonic() + 30.0
        while (left := self._processes() + _cables()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left + [f"shared memory {path}" for path in Path("/dev/shm").glob("*quorate*")]

    def _processes(self) -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if entry.joinpath("cwd").readlink() == self.folder:
                    found.append(f"process {entry.name}")
            except OSError:
                continue  # gone meanwhile, or not ours to look at
        return found

    def _quorate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"TMPDIR": str(self.folder / "temporary")}
        (self.folder / "temporary").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "quorate", *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )


def write_shards(folder: Path) -> None:
    """Numbers in a few files of JSON lines."""
    numbers = random.Random(3)
    folder.mkdir()
    for shard in range(5):
        records = ({"inputs": [numbers.gauss() for _ in range(64)], "target": numbers.randrange(4)} for _ in range(201))
        (folder / f"{shard}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def _cables() -> list[str]:
    """Of networks that were made for a run."""
    return [f"network device {path.name}" for path in Path("/sys/class/net").glob("quorate-*")]


def main() -> None:
    """Soak until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--mtbf", default="5s")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each next one has the next")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quorate-soak-")).resolve()
    soak = Soak(folder, options.mtbf)
    over = time.monotonic() + 60 * options.minutes
    soak.prepare()
    for seed, name in zip(itertools.count(options.seed), itertools.cycle(JOBS)):
        if time.monotonic() >= over:
            break
        soak.disturb(name, seed)
    shutil.rmtree(folder)
    print(
        f"{soak.runs} runs, {soak.faults} faults, {soak.recoveries} recoveries: the same bits, and nothing left behind"
    )


if __name__ == "__main__":
    main()
