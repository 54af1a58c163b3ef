"""Which GPUs a process may use, found without asking their driver."""

from pathlib import Path

import pytest

from quorate.core.gpus import VISIBLE, driver_here, gpus_here, torch_has_cuda, use_gpu, users_of


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("0", "1", "2")),
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


def test_in_a_container_cuda_counts_those_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    (tmp_path / "nvidia3").touch()
    assert gpus_here(tmp_path) == ("0",)


def test_where_there_is_none_none_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    assert gpus_here(tmp_path) == ()


def test_a_worker_sees_the_one_that_it_was_given(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")
    use_gpu("1")
    assert gpus_here(devices) == ("1",)


def test_what_torch_was_built_for_is_read_from_its_text() -> None:
    import torch

    assert torch_has_cuda() == (torch.version.cuda is not None)


def test_the_driver_tells_its_version(tmp_path: Path) -> None:
    page = tmp_path / "version"
    assert driver_here(page) == ""
    page.write_text("NVRM version: NVIDIA UNIX x86_64  580.159.04  Release Build\nGCC version: 13\n")
    assert driver_here(page) == "580.159.04"


def test_who_uses_a_gpu_is_told_with_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["4711, /usr/bin/python3, 70000", "12, tritonserver, 71000", "13, [Not Found], [N/A]", ""]
    monkeypatch.setattr("quorate.core.gpus._ask", lambda *_: lines)
    assert users_of("0") == "process 12 (tritonserver) has 71,000 MiB, process 4711 (python3) has 70,000 MiB"
    monkeypatch.setattr("quorate.core.gpus._ask", lambda *_: [])
    assert users_of("0") == ""
