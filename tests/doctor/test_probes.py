"""The process in which torch is looked at; where torch misbehaves, modules play it."""

import os
from pathlib import Path

import pytest
import torch

from quorate.doctor.software import _try_torch, probe_torch
from quorate.replica.device import Device


@pytest.mark.parametrize(
    ("source", "patience", "words"),
    [
        ("raise ImportError('libtorch_cpu.so: cannot open')", 40.0, "ImportError: libtorch_cpu.so"),
        ("import os; os.kill(os.getpid(), 4)", 40.0, "was killed by SIGILL"),
        ("import os; os._exit(3)", 40.0, "exited with code 3"),
        ("print('hello'); __version__ = 'odd'", 40.0, "ModuleNotFoundError"),
        ("import threading; threading.Event().wait()", 0.5, "not ended within 0.5 s"),
    ],
    ids=["broken", "crashing", "leaving", "not torch", "hanging"],
)
def test_a_torch_that_misbehaves_takes_nobody_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, patience: float, words: str
) -> None:
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    facts = probe_torch(patience)
    assert words in facts.error
    assert facts.version == ""


def test_the_torch_that_is_installed_gives_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported it already; the verb does it in another among the long tests."""
    monkeypatch.setattr(Device, "pin", lambda *_, **__: None)
    facts = _try_torch()
    assert facts.error == ""
    assert facts.version == torch.__version__
    assert facts.repeats_bits
