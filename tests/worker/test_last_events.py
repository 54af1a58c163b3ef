"""What a worker still has to tell when it leaves."""

import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quorate.storage.run_folder import RunFolder
from quorate.training.checkpointer import Checkpointer
from quorate.worker.assignment import Assignment
from quorate.worker.membership import Membership
from quorate.worker.process import Worker


class Calls:
    """Notes what is called, and stands for whoever is."""

    divergence = None

    def __init__(self, name: str, noted: list[str]) -> None:
        self._name, self._noted = name, noted

    def __getattr__(self, called: str) -> Any:
        return lambda *_: self._noted.append(f"{self._name}.{called}")


class Done(Worker):
    """Has nothing left to do but a save that is under way."""

    def __init__(self, noted: list[str]) -> None:
        self._membership = cast(Membership, Calls("membership", noted))
        self._checkpointer = cast(Checkpointer, Calls("checkpointer", noted))
        self._close_monitor = lambda: noted.append("monitor.close")
        self._assignment = cast(Assignment, SimpleNamespace(mode=SimpleNamespace(is_training=False)))
        self._run = cast(RunFolder, None)

    def _live(self) -> int:
        return 0


def test_that_the_last_checkpoint_was_saved_is_told_before_the_worker_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    noted: list[str] = []
    assert Done(noted).live() == 0
    assert noted == ["checkpointer.close", "monitor.close", "membership.flush_last", "membership.close"]
