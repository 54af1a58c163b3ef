"""The process in which torch is looked at; where torch misbehaves, modules play it."""

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from quorate.core.installation import install_of
from quorate.doctor import software
from quorate.doctor.report import Finding, Level
from quorate.doctor.software import (
    Requirement,
    TorchFacts,
    _try_torch,
    check_devices,
    check_packages,
    check_system,
    check_torch,
    judge_extras,
    probe_torch,
    read_requirements,
)
from quorate.replica.device import Device

TESTED = Requirement("torch", ((">=", "2.11"), ("<", "2.14")))
WELL = TorchFacts(version="2.13.0+cpu", capability="AVX512", repeats_bits=True)


def test_requirements_are_read_from_metadata() -> None:
    lines = ["torch==2.13.0", 'scikit-learn>=1.6; extra == "examples"', "rich (>=13)", "hypothesis ; extra=='dev'"]
    assert read_requirements(lines) == [
        Requirement("torch", (("==", "2.13.0"),)),
        Requirement("scikit-learn", ((">=", "1.6"),), "examples"),
        Requirement("rich", ((">=", "13"),)),
        Requirement("hypothesis", extra="dev"),
    ]


@pytest.mark.parametrize(
    ("asked", "given", "accepted"),
    [
        (">=2.10", "2.9.4", False),
        (">=2.10", "2.10", True),
        (">=2", "10.0.1", True),
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.13.0", "2.13", True),
        ("==2.13.0", "2.13.1", False),
        ("", "0.1", True),
    ],
)
def test_versions_are_compared_as_numbers(asked: str, given: str, accepted: bool) -> None:
    (some,) = read_requirements([f"some{asked}"])
    assert some.accepts(given) is accepted


@pytest.mark.parametrize(
    ("given", "accepted"), [("2.10.1", False), ("2.11", True), ("2.13.2+cpu", True), ("2.14", False)]
)
def test_a_range_of_versions_has_two_ends(given: str, accepted: bool) -> None:
    (ranged,) = read_requirements(["torch<2.14,>=2.11"])
    assert ranged == TESTED
    assert str(ranged) == "torch>=2.11,<2.14"
    assert ranged.accepts(given) is accepted
    facts = TorchFacts(version=given, capability="AVX2", repeats_bits=True)
    assert check_torch(facts, ranged).level is (Level.OK if accepted else Level.WARNING)


def test_jobs_run_on_linux() -> None:
    assert check_system("Linux", "6.1", "x86_64").level is Level.OK
    elsewhere = check_system("Darwin", "24.0", "arm64")
    assert (elsewhere.level, elsewhere.remedy) == (Level.PROBLEM, "Run it in a Linux container.")


def test_packages_that_lack_are_told_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = read_requirements(["numpy>=2", "rich>=13", "xxhash>=3.5"])
    assert check_packages(needed).level is Level.OK
    needed = [*needed[:2], Requirement("no-such-package", ((">=", "3.5"),))]
    monkeypatch.setattr(software, "version", version)
    lacking = check_packages(needed)
    assert lacking.level is Level.PROBLEM
    assert lacking.text == "numpy is 1.26.4, not >=2, no-such-package is not installed"
    assert lacking.remedy == "pip install 'numpy>=2' 'no-such-package>=3.5'"


def version(package: str) -> str:
    """Of what is installed here, as a test has it."""
    if package == "no-such-package":
        raise PackageNotFoundError(package)
    return {"numpy": "1.26.4", "rich": "15.0"}[package]


def test_extras_are_one_line_and_never_more_than_a_note() -> None:
    (wanted,) = read_requirements(['scikit-learn>=1.6; extra == "examples"'])
    lacking = {"examples": {}, "s3": {wanted: "s3fs is not installed"}, "ray": {wanted: "ray is 2.1, not ==2.60.0"}}
    found = judge_extras(lacking)
    assert (found.name, found.level) == ("extras", Level.NOTE)
    assert found.text == "installed: examples; not installed: s3, ray; ray is 2.1, not ==2.60.0"
    assert found.remedy == f"If you want one: {install_of('NAME')}"
    assert judge_extras({"s3": {}}) == Finding("extras", Level.OK, "installed: s3")


@pytest.mark.parametrize(
    ("facts", "level", "words", "remedy"),
    [
        (WELL, Level.OK, "a tested version", ""),
        (TorchFacts(version="2.14.0", repeats_bits=True), Level.WARNING, "2.14.0, not the >=2.11", "torch>=2.11"),
        (TorchFacts(version="2.13.0"), Level.PROBLEM, "other bits the second time", "torch>=2.11"),
        (TorchFacts(error="ImportError: libgomp"), Level.PROBLEM, "ImportError: libgomp", "torch>=2.11"),
    ],
)
def test_torch(facts: TorchFacts, level: Level, words: str, remedy: str) -> None:
    found = check_torch(facts, TESTED)
    assert found.level is level
    assert words in found.text
    assert remedy in found.remedy


def test_devices_are_information() -> None:
    assert check_devices(WELL) == Finding("devices", Level.NOTE, "CPU (AVX512 kernels) only")
    with_gpu = check_devices(TorchFacts(version="2.13.0", capability="AVX2", repeats_bits=True, cuda=("H200", "H200")))
    assert with_gpu.level is Level.NOTE
    assert "H200, H200" in with_gpu.text
    assert check_devices(TorchFacts(error="gone")).level is Level.NOTE
    built = TorchFacts(
        version="2.11.0", capability="AVX2", repeats_bits=True, cuda=("H200 (139.8 GB)",), built_for="13.0"
    )
    assert check_devices(built, 1, "580.1").text == "CPU (AVX2 kernels); H200 (139.8 GB) by CUDA 13.0, driver 580.1"


def test_gpus_that_torch_cannot_use_are_told_with_the_reason() -> None:
    without = check_devices(WELL, 2)
    assert without.level is Level.WARNING
    assert "although this machine has 2 GPUs: torch 2.13.0+cpu is built without CUDA" in without.text
    silent = check_devices(TorchFacts(version="2.11.0", capability="AVX2", built_for="13.0"), 1, "470.82")
    assert "the driver 470.82 does not answer torch (CUDA 13.0)" in silent.text
    assert "nvidia-smi" in silent.remedy


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
