"""The processes in which torch and the kernel are looked at; where torch misbehaves, modules play it."""

import signal
import subprocess
from pathlib import Path

import pytest
import torch

from quorate.doctor import checkup
from quorate.doctor.checkup import checks_of
from quorate.doctor.machine import NEEDED, USED, check_kernel
from quorate.doctor.probes import _try_torch, probe_kernel, probe_torch
from quorate.doctor.report import Finding, Level
from quorate.training.device import CpuDevice


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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = probe_torch(patience)
    assert words in facts.error
    assert facts.version == ""


def test_the_torch_that_is_installed_gives_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported it already; the verb does it in another among the long tests."""
    monkeypatch.setattr(CpuDevice, "pin", lambda *_, **__: None)
    facts = _try_torch()
    assert facts.error == ""
    assert facts.version == torch.__version__
    assert facts.repeats_bits


def test_the_kernel_of_this_machine_has_what_jobs_need() -> None:
    found = check_kernel(probe_kernel(patience=40.0))
    assert found.level is Level.OK, found.text


@pytest.mark.parametrize(
    ("feature", "level"),
    [
        ("fork", Level.PROBLEM),
        ("pidfd", Level.PROBLEM),
        ("parent-death signal", Level.PROBLEM),
        ("memfd", Level.WARNING),
    ],
)
def test_a_feature_that_the_kernel_lacks_is_named_with_its_use(feature: str, level: Level) -> None:
    troubles = dict.fromkeys(("fork", "pidfd", "parent-death signal", "memfd"), "")
    found = check_kernel(troubles | {feature: "OSError: [Errno 38] Function not implemented"})
    assert found.level is level
    why = (NEEDED | USED)[feature]
    assert found.text == f"{feature} does not work (OSError: [Errno 38] Function not implemented), and {why}"
    assert "seccomp" in found.remedy


def kernel_finding() -> Finding:
    (check,) = [check for check in checks_of(Path("runs"), {}) if check.name == "kernel"]
    found = check.look()
    assert isinstance(found, Finding)
    return found


def test_a_machine_that_is_too_busy_to_try_the_kernel_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "PROCESS_PATIENCE", 0.0)
    found = kernel_finding()
    assert found.level is Level.WARNING
    assert "has not ended within 0 s" in found.text
    assert "ask again" in found.remedy


def test_a_kernel_that_kills_whoever_tries_it_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: float) -> dict[str, str]:
        raise subprocess.CalledProcessError(-signal.SIGSYS, "python")

    monkeypatch.setattr(checkup, "probe_kernel", killed)
    found = kernel_finding()
    assert found.level is Level.PROBLEM
    assert "was killed by SIGSYS" in found.text
    assert "seccomp" in found.remedy


def test_a_process_that_starts_python_has_time_for_it() -> None:
    patience = {check.name: check.patience for check in checks_of(Path("runs"), {})}
    assert checkup.PROCESS_PATIENCE >= 10
    assert min(patience["kernel"], patience["ports"]) >= 2 * checkup.PROCESS_PATIENCE
