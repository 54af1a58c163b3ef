"""A checkpoint of each format that was ever written lies in `formats/`; all of them are of one and the same state."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quorate.checkpoint.listing import read_manifest
from quorate.checkpoint.manifest import FORMAT, Manifest
from quorate.checkpoint.part_file import read_part, verify_part
from quorate.checkpoint.tensor_file import tensors_in
from quorate.checkpoint.tree import decode
from quorate.core.digests import content_digest
from quorate.core.errors import CheckpointError, NewerFormatError
from quorate.core.generation import Cursor, Phase
from sealing import cipher

FORMATS = Path(__file__).parent / "formats"
NAME = "step-00000006-evaluated"
SAMPLES = sorted(path.name for path in FORMATS.iterdir())


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLE_KEY", bytes(range(32)).hex())


def loaded(path: Path) -> tuple[Manifest, dict[str, Any]]:
    manifest = read_manifest(path)
    used = None if manifest.encryption is None else cipher()
    tensors: dict[str, torch.Tensor] = {}
    for part in manifest.parts:
        verify_part(path, part)
        tensors |= tensors_in(read_part(path, part, used))
    return manifest, decode(manifest.opened(used).skeleton, tensors)


def resealed(text: str, **changed: Any) -> str:
    """A manifest with other values and a digest that fits them."""
    content = json.loads(text) | changed
    del content["digest"]
    rest = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()) + "\n}\n"
    return f'{{"digest": "{content_digest(rest.encode())}",\n' + rest


def test_there_is_a_sample_of_each_format() -> None:
    formats = {json.loads((FORMATS / sample / NAME / "manifest.json").read_text())["format"] for sample in SAMPLES}
    assert formats == set(range(1, FORMAT + 1))


@pytest.mark.parametrize("sample", SAMPLES)
def test_is_read_as_the_present_format(sample: str) -> None:
    manifest, state = loaded(FORMATS / sample / NAME)
    assert (manifest.format, manifest.cursor) == (FORMAT, Cursor(6, Phase.EVALUATED))
    assert all(part.digest.startswith(("xxh3-128:", "sha-256:")) for part in manifest.parts)
    assert manifest.job["task"] == "sample.line:Line"
    assert state["progress"]["cursor"] == [6, 1]
    assert state["progress"]["metrics"] == manifest.metrics
    adam = state["replica"]["optimizers"][""]["state"]
    assert {int(each["step"]) for each in adam.values()} == {6}
    # Format 1 had one part, which any reader of safetensors opens.
    expected = load_file(FORMATS / "1" / NAME / "state.safetensors")
    for name, tensor in state["replica"]["tensors"].items():
        assert torch.equal(tensor, expected[f"replica.tensors.{name}"])
    assert len(state["replica"]["tensors"]) == 9


def test_brought_to_the_present_format_it_is_written_as_such() -> None:
    manifest = read_manifest(FORMATS / "1" / NAME)
    text = manifest.to_json()
    assert json.loads(text)["format"] == FORMAT
    assert "xxh3_128" not in text
    assert Manifest.from_json(text) == manifest


def test_a_format_of_the_future_is_no_damage_unless_its_digest_says_so() -> None:
    text = resealed((FORMATS / "1" / NAME / "manifest.json").read_text(), format=FORMAT + 1)
    with pytest.raises(
        NewerFormatError, match=rf"a newer Quorate \(format {FORMAT + 1}; this one reads up to {FORMAT}\)"
    ):
        Manifest.from_json(text)
    with pytest.raises(CheckpointError, match="differs from its own digest") as damaged:
        Manifest.from_json(text.replace('"step"', '"stem"'))
    assert not isinstance(damaged.value, NewerFormatError)


@pytest.mark.parametrize("given", [0, "1", None, True, 1.0])
def test_an_unknown_format_is_refused_with_those_that_are_known(given: Any) -> None:
    text = resealed((FORMATS / "1" / NAME / "manifest.json").read_text(), format=given)
    with pytest.raises(CheckpointError, match=rf"has format {given!r} and .* formats 1, 2 and 3"):
        Manifest.from_json(text)


@pytest.mark.parametrize("parts", [None, [None], [{}], [{"file": "a", "bytes": 1}], 7])
def test_an_earlier_format_that_is_not_as_it_was_is_refused(parts: Any) -> None:
    text = (FORMATS / "1" / NAME / "manifest.json").read_text()
    assert Manifest.from_json(resealed(text)).cursor.step == 6
    with pytest.raises(CheckpointError, match="of another kind"):
        Manifest.from_json(resealed(text, parts=parts))
