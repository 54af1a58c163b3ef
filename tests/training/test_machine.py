"""Machines that compute alike have one canary; what is pinned stays pinned."""

import contextlib
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from quorate.training import machine
from quorate.training.machine import canary, machine_facts, pin_machine


def told_by_child(act: Callable[[], str]) -> str:
    """What a forked process says: pinning must not leak into the other tests."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(write, act().encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as told:
        return told.read()


def test_the_canary_is_the_same_each_time_and_in_each_process() -> None:
    songs = {canary(), canary(), told_by_child(canary), told_by_child(canary)}
    assert len(songs) == 1
    assert "" not in songs


def test_the_canary_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    canary()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kernel", ["conv2d", "layer_norm"])
def test_a_kernel_that_rounds_otherwise_changes_the_canary(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, original = canary(), getattr(machine, kernel)

    def rounded_otherwise(*args: Any, **keys: Any) -> torch.Tensor:
        result: torch.Tensor = original(*args, **keys)
        return result * (1 + 2**-23)

    monkeypatch.setattr(machine, kernel, rounded_otherwise)
    assert canary() != usual


def test_flushing_denormals_changes_the_canary() -> None:
    def flushed() -> str:
        return canary() if torch.set_flush_denormal(True) else "not supported by this processor"

    assert told_by_child(flushed) not in ("", canary())


def test_pinning_fixes_threads_denormals_and_kernels() -> None:
    def pinned() -> str:
        torch.set_flush_denormal(True)
        pin_machine(2, deterministic=True)
        kept = float(torch.tensor(1e-38) * 0.01) != 0.0
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        return f"{torch.get_num_threads()} {torch.are_deterministic_algorithms_enabled()} {kept} {fill}"

    assert told_by_child(pinned) == "2 True True False"


def test_a_job_may_do_without_deterministic_kernels() -> None:
    def pinned() -> str:
        pin_machine(1, deterministic=True)
        pin_machine(1, deterministic=False)
        return f"{torch.get_num_threads()} {torch.are_deterministic_algorithms_enabled()}"

    assert told_by_child(pinned) == "1 False"


def test_facts_name_what_the_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine_facts(3, True)
    assert facts["threads"] == "3"
    assert facts["deterministic"] == "True"
    assert facts["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in facts.values())
    assert machine_facts(4, True) != facts
    monkeypatch.setattr(machine, "version", _absent)
    assert machine_facts(3, True)["quorate"] == "unknown"


def _absent(package: str) -> str:
    raise PackageNotFoundError(package)
