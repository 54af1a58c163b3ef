import errno
import mmap

import pytest
import torch

from quorate.core.machine import is_shortage


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


def test_other_errors_are_none() -> None:
    others = [OSError(errno.ENOSPC, "a full disk"), RuntimeError("shapes differ"), ValueError()]
    assert not any(map(is_shortage, others))
