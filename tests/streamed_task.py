"""A task whose samples lie in shards of any kind. The environment says how long a lane takes, and how much is kept."""

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import quorate
from quorate.data import samples

PAUSE = float(os.environ.get("PAUSE", "0"))
# The call of the loss that waits for the first checkpoint of the run, and the one that never ends.
SAVED_BY, STAYS_IN = (int(os.environ.get(name, "0")) for name in ("SAVED_BY", "STAYS_IN"))
CALLS = itertools.count(1)
if "KEPT_BYTES" in os.environ:
    # So few that every epoch reads the shards again: a change under the job is met, and so is a store that is away.
    assert "LIMIT" in vars(samples)
    vars(samples)["LIMIT"] = int(os.environ["KEPT_BYTES"])


def of_tar(record: dict[str, Any]) -> dict[str, Any]:
    """One that draws: the noise of a sample is its own, whoever reads it."""
    inputs = torch.from_numpy(numpy.frombuffer(record["x"], numpy.float32).copy())
    return {"x": inputs + 0.01 * torch.rand(3), "y": torch.tensor(float(record["y"]))}


def of_jsonl(record: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.tensor(record["x"]), "y": torch.tensor(record["y"])}


def of_text(line: str) -> dict[str, Any]:
    target, *inputs = map(float, line.split()[:4])
    return {"x": torch.tensor(inputs), "y": torch.tensor(target)}


DECODE: dict[str, Callable[[Any], Any]] = {"tar": of_tar, "jsonl": of_jsonl, "text": of_text}


def is_saved() -> bool:
    """Whether the newest run has a checkpoint."""
    return any(max(Path("runs").glob("*-[0-9]*")).glob("checkpoints/step-*"))


class Streamed(quorate.Task):
    place: str = "train"
    validation: str = "validation"
    kind: str = "parquet"
    window: int = 8

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 1))

    def datasets(self) -> Any:
        decode = DECODE.get(self.kind)
        train = quorate.Shards(self.place, decode=decode, window=self.window)
        return train, (quorate.Shards(self.validation, decode=decode) if self.validation else None)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        time.sleep(PAUSE)
        calls = next(CALLS)
        while Path("hold").exists() or calls == STAYS_IN or (calls == SAVED_BY and not is_saved()):
            time.sleep(0.01)  # between two looks
        return F.mse_loss(model(batch["x"]).squeeze(-1), batch["y"])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
