import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.checkpoint.listing import read_manifest
from quorate.checkpoint.manifest import MANIFEST, Manifest, Part
from quorate.checkpoint.part_file import read_part, verify_part, write_part
from quorate.checkpoint.tensor_file import TensorFile, tensors_in
from quorate.checkpoint.tree import decode, encode
from quorate.core.errors import CheckpointError
from sealing import CAN_ENCRYPT, cipher

STATE = {"weight": torch.arange(24.0).reshape(4, 6), "flags": torch.tensor([True, False]), "step": 3}
WAYS = {"plain": "xxh3-128", "sha": "sha-256"} | ({"encrypted": "xxh3-128"} if CAN_ENCRYPT else {})


def build(folder: Path, digest: str, used: Any) -> Path:
    """A checkpoint of two parts."""
    path = folder / "step-00000003"
    path.mkdir(parents=True)
    encoded = encode(STATE)
    parts = tuple(
        write_part(path, f"{number}-of-2", TensorFile({name: tensor}).chunks(), digest=digest, cipher=used)
        for number, (name, tensor) in enumerate(encoded.tensors.items(), 1)
    )
    assert len(parts) == 2
    manifest = Manifest(3, 0, "2026-01-01T00:00:00+00:00", parts, encoded.skeleton, "ef", {}, {}, {})
    (path / MANIFEST).write_text((manifest.sealed(used) if used else manifest).to_json())
    return path


def load(path: Path, used: Any) -> Any:
    manifest = read_manifest(path)
    tensors: dict[str, torch.Tensor] = {}
    for part in manifest.parts:
        tensors |= tensors_in(read_part(path, part, used))
    return decode(manifest.opened(used).skeleton, tensors)


def verify(path: Path) -> None:
    for part in read_manifest(path).parts:
        verify_part(path, part)


@dataclass(frozen=True)
class Sample:
    path: Path
    cipher: Any
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sample, ...]:
    found = []
    for way, digest in WAYS.items():
        used = cipher() if way == "encrypted" else None
        path = build(tmp_path_factory.mktemp(way), digest, used)
        assert torch.equal(load(path, used)["weight"], STATE["weight"])  # type: ignore[arg-type]
        found.append(Sample(path, used, {file.name: file.read_bytes() for file in sorted(path.iterdir())}))
    return tuple(found)


def damaged(content: bytes, kind: str, at: int, bit: int) -> bytes:
    at %= len(content)
    if kind == "flipped":
        return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "inserted":
        return content[:at] + bytes([at % 256]) + content[at:]
    return content + bytes([at % 256])


class TestAnyDamage:
    @given(
        which=st.integers(0, len(WAYS) - 1),
        file=st.integers(0, 2),
        kind=st.sampled_from(["flipped", "flipped", "cut", "inserted", "appended", "missing"]),
        at=st.integers(0, 1 << 16),
        bit=st.integers(0, 7),
    )
    @settings(max_examples=6 * settings().max_examples, deadline=None)
    def test_to_any_file_is_found(
        self, samples: tuple[Sample, ...], which: int, file: int, kind: str, at: int, bit: int
    ) -> None:
        sample = samples[which]
        name = sorted(sample.files)[file]
        try:
            if kind == "missing":
                (sample.path / name).unlink()
            else:
                spoilt = damaged(sample.files[name], kind, at, bit)
                assert spoilt != sample.files[name]
                (sample.path / name).write_bytes(spoilt)
            for read in (verify, lambda path: load(path, sample.cipher)):
                with pytest.raises(CheckpointError) as told:
                    read(sample.path)
                assert name in str(told.value) or (name == MANIFEST and "manifest" in str(told.value))
                assert str(sample.path) in str(told.value)
        finally:
            (sample.path / name).write_bytes(sample.files[name])
        verify(sample.path)

    def test_parts_that_changed_places_are_found(self, samples: tuple[Sample, ...]) -> None:
        for sample in samples:
            first, second = (sample.path / name for name in sorted(sample.files)[:2])
            first.write_bytes(sample.files[second.name])
            try:
                with pytest.raises(CheckpointError, match=first.name):
                    verify(sample.path)
            finally:
                first.write_bytes(sample.files[first.name])


def test_other_line_ends_are_another_manifest(tmp_path: Path) -> None:
    path = build(tmp_path, "xxh3-128", None)
    whole = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(whole.replace(b"\n", b"\r\n"))
    with pytest.raises(CheckpointError, match="differs from its own digest"):
        read_manifest(path)


class TestPart:
    CONTENT = b"x" * 300

    @pytest.fixture
    def part(self, tmp_path: Path) -> Part:
        (tmp_path / "part").write_bytes(self.CONTENT)
        return Part("part", 300, f"xxh3-128:{xxhash.xxh3_128_hexdigest(self.CONTENT)}")

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"bytes": 299}, "too long: it has 300 bytes and the manifest says 299"),
            ({"bytes": 10**18}, "truncated: it has 300 bytes and the manifest says 1,000,"),
            ({"digest": "xxh3-128:00"}, "damaged or of another checkpoint: its digest is .* manifest says 00"),
            ({"digest": "md5:00"}, "the digest 'md5' is unknown"),
            ({"digest": ""}, "the digest '' is unknown"),
            ({"file": "other"}, "part other is missing"),
            ({"file": "../part"}, "not inside the checkpoint"),
            ({"file": "/etc/passwd"}, "not inside the checkpoint"),
            ({"file": ".."}, "cannot be read: Is a directory"),
        ],
    )
    def test_that_is_not_what_the_manifest_says(
        self, tmp_path: Path, part: Part, changed: dict[str, Any], words: str
    ) -> None:
        verify_part(tmp_path, part)
        wrong = dataclasses.replace(part, **changed)
        with pytest.raises(CheckpointError, match=words):
            verify_part(tmp_path, wrong)
        with pytest.raises(CheckpointError, match=words):
            read_part(tmp_path, wrong)

    def test_that_becomes_shorter_while_it_is_read(
        self, tmp_path: Path, part: Part, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fstat, looks = os.fstat, []

        def cut_afterwards(descriptor: int) -> os.stat_result:
            """Whoever opens it looks what it is, and then how long."""
            looks.append(fstat(descriptor))
            if len(looks) == 2:
                os.truncate(tmp_path / "part", 100)
            return looks[-1]

        monkeypatch.setattr(os, "fstat", cut_afterwards)
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            verify_part(tmp_path, part)
