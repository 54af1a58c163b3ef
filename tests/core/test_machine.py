"""Cores and memory, as far as this process may use them."""

import errno
import mmap
import os
from pathlib import Path

import pytest
import torch

from quorate.core import machine
from quorate.core.machine import Limits, cores_within, is_shortage, read_limits, usable_cores


@pytest.mark.parametrize(
    ("allowed", "quota", "usable"),
    [(4, None, 4), (4, 8.0, 4), (4, 4.0, 4), (4, 2.5, 2), (4, 1.0, 1), (4, 0.5, 1), (1, 2.5, 1)],
)
def test_whole_cores_of_what_is_allowed_and_given(allowed: int, quota: float | None, usable: int) -> None:
    assert cores_within(allowed, quota) == usable


def test_the_mask_and_the_quota_of_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5, 7})
    monkeypatch.setattr(machine, "read_limits", lambda: Limits(cores=3.2))
    assert usable_cores() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    assert usable_cores() == 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def limits(root: Path, membership: str) -> Limits:
    file = root.parent / "membership"
    file.write_text(membership)
    return read_limits(root, file)


def put(root: Path, name: str, content: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(content)


def test_version_2_gives_the_tightest_limit_on_the_way_up(root: Path) -> None:
    put(root, "docker/cpu.max", "150000 100000\n")
    put(root, "docker/job/cpu.max", "400000 100000\n")
    put(root, "docker/memory.max", "1000000\n")
    put(root, "docker/memory.current", "700000\n")
    put(root, "docker/memory.stat", "anon 400000\nactive_file 100000\ninactive_file 200000\n")
    put(root, "docker/job/memory.max", "max\n")
    assert limits(root, "0::/docker/job\n") == Limits(cores=1.5, memory=1_000_000, free_memory=600_000)


def test_version_1_has_a_folder_for_each_controller(root: Path) -> None:
    put(root, "cpu,cpuacct/docker/cpu.cfs_quota_us", "50000\n")
    put(root, "cpu,cpuacct/docker/cpu.cfs_period_us", "100000\n")
    put(root, "cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    put(root, "memory/docker/memory.limit_in_bytes", "2000000\n")
    put(root, "memory/docker/memory.usage_in_bytes", "500000\n")
    put(root, "memory/docker/memory.stat", "inactive_file 7\ntotal_inactive_file 100000\ntotal_active_file 200000\n")
    put(root, "memory/memory.limit_in_bytes", "9223372036854771712\n")
    found = limits(root, "5:cpu,cpuacct:/docker\n4:memory:/docker\n")
    assert found == Limits(cores=0.5, memory=2_000_000, free_memory=1_800_000)


@pytest.mark.parametrize("membership", ["0::/\n", "", "nonsense\n", "0::/../../host/slice\n", "3:cpu:/gone\n"])
def test_no_limits_and_odd_memberships(root: Path, membership: str) -> None:
    put(root, "cpu.max", "max 100000\n")
    assert limits(root, membership) == Limits()


def test_files_kept_in_memory_do_not_free_more_than_the_limit(root: Path) -> None:
    put(root, "memory.max", "1000\n")
    put(root, "memory.current", "500\n")
    put(root, "memory.stat", "inactive_file 600\n")  # the two files are read at different moments
    assert limits(root, "0::/\n").free_memory == 1000


def test_where_there_are_no_control_groups(tmp_path: Path) -> None:
    assert read_limits(tmp_path / "none", tmp_path / "none either") == Limits()


@pytest.mark.parametrize(
    "ask",
    [lambda: bytearray(1 << 60), lambda: mmap.mmap(-1, 1 << 60), lambda: torch.zeros(1 << 58)],
    ids=["of Python", "of the kernel", "of torch"],
)
def test_memory_that_nobody_has_is_a_shortage_whoever_is_asked(ask: object) -> None:
    assert callable(ask)
    with pytest.raises((MemoryError, OSError, RuntimeError)) as raised:
        ask()
    assert is_shortage(raised.value)


def test_so_is_that_of_a_gpu() -> None:
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_shortage(RuntimeError("CUDA error: out of memory"))


def test_other_errors_are_none() -> None:
    others = [OSError(errno.ENOSPC, "a full disk"), RuntimeError("shapes differ"), ValueError()]
    assert not any(map(is_shortage, others))
