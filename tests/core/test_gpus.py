"""Which GPUs a process may use, found without asking their driver."""

from pathlib import Path

import pytest

from quorate.core.gpus import VISIBLE, gpus_here, use_gpu


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("0", "1", "10")),
        ("", ()),
        ("-1", ()),
        ("1", ("1",)),
        (" 10 , 0 ", ("10", "0")),
        ("GPU-8932f937", ("GPU-8932f937",)),
    ],
)
def test_those_that_are_there_and_visible(
    visible: str | None, expected: tuple[str, ...], devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, visible)
    assert gpus_here(devices) == expected


def test_where_there_is_none_none_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    assert gpus_here(tmp_path) == ()


def test_a_worker_sees_the_one_that_it_was_given(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")
    use_gpu("1")
    assert gpus_here(devices) == ("1",)
