"""A task of a few parameters that goes wrong, or takes its time, on request: the environment says how."""

import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import quorate

TROUBLE = os.environ.get("TROUBLE", "")
PAUSE = float(os.environ.get("PAUSE", "0"))
SLOW = float(os.environ.get("SLOW", "0"))
HOLD = int(os.environ.get("HOLD", "0"))
AWAITED = os.environ.get("AWAITED", "")
CALLS_BEFORE_TROUBLE = 9
CALLS = itertools.count(1)


def get_into_trouble(place: str) -> None:
    """Raise where the environment asks for it."""
    if place == TROUBLE:
        raise ValueError(f"trouble in {place}")


if TROUBLE == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def take_long(place: str) -> None:
    """Leave a sign that we are there, and stay, where the environment asks for it."""
    if f"slow {place}" == TROUBLE:
        Path(f"in-{place}").touch()
        time.sleep(600)


def hold(calls: int) -> None:
    """From the call on that the environment names, if it does, wait in each for the file `go`."""
    while 0 < HOLD <= calls and not Path("go").exists():
        time.sleep(0.01)


def await_file() -> None:
    """Wait until there is a file that the environment names, if it does: a save goes on beside the training."""
    while AWAITED and not any(Path().glob(AWAITED)):
        time.sleep(0.01)


def dawdle() -> None:
    """Take the time that the environment names, as long as there is no file `go`; with a file `slower` ten times it."""
    over = time.monotonic() + SLOW * (10 if SLOW and Path("slower").exists() else 1)
    while time.monotonic() < over and not Path("go").exists():
        time.sleep(0.01)


take_long("import")
get_into_trouble("import")


class Points:
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 5:
            get_into_trouble("sample")
        return self.inputs[index], self.inputs[index].sum()


class TroubledSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        get_into_trouble("optimizer step")
        return super().step(closure)


class Tiny(quorate.Task):
    learning_rate: float = 0.01

    def model(self) -> nn.Module:
        print("a word from the task")
        get_into_trouble("model")
        return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))

    def datasets(self) -> Any:
        take_long("datasets")
        get_into_trouble("datasets")
        return Points(32), Points(6)

    def collate(self, samples: Sequence[Any]) -> Any:
        get_into_trouble("collate")
        return super().collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        time.sleep(PAUSE)
        dawdle()
        calls = next(CALLS)
        hold(calls)
        loss = F.mse_loss(model(inputs).squeeze(-1), targets)
        if calls < CALLS_BEFORE_TROUBLE:
            return loss
        await_file()
        get_into_trouble("loss")
        if TROUBLE == "late refusal":
            raise quorate.TaskError("the task has changed its mind")
        if TROUBLE == "sys.exit":
            sys.exit("the task has had enough")
        if TROUBLE == "os._exit":
            os._exit(3)
        if TROUBLE == "segfault":
            ctypes.string_at(0)
        if TROUBLE == "backward":
            loss.register_hook(lambda gradient: get_into_trouble("backward"))  # type: ignore[no-untyped-call]
        if TROUBLE == "nan":
            return loss * float("nan")
        return (inputs if TROUBLE == "vector" else 1.0) * loss

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        get_into_trouble("metrics")
        return {"loss": F.mse_loss(model(inputs).squeeze(-1), targets)}

    def optimizer(self, model: nn.Module) -> Any:
        return TroubledSgd(model.parameters(), lr=self.learning_rate, momentum=0.9)


class NotATask:
    pass
