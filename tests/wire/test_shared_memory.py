"""Shared memory is there, or an error is: never a process that the kernel kills for it."""

from pathlib import Path

import pytest

from quorate.core.errors import JobError
from quorate.core.machine import Limits, read_limits
from quorate.wire import shared_memory
from quorate.wire.shared_memory import Segment


@pytest.fixture
def container(tmp_path: Path) -> Limits:
    """A container with 10,000 bytes, of which 8,001 are in use."""
    group = tmp_path / "cgroup" / "docker"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("10000\n")
    (group / "memory.current").write_text("8001\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/docker\n")
    return read_limits(tmp_path / "cgroup", membership)


def test_too_little_memory_in_a_container_is_an_error_before_use(
    container: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "read_limits", lambda: container)
    Segment.create(1_999).close()
    told = r"not enough memory for the 2,000 bytes .*\(1,999 are free of what this container is given\).*`workers`"
    with pytest.raises(JobError, match=told):
        Segment.create(2_000)
