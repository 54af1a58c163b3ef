import dataclasses
import json

import pytest

from quorate.checkpoint.manifest import Manifest, Part
from quorate.core.cursor import Cursor, Phase
from quorate.core.errors import CheckpointError

MANIFEST = Manifest(
    step=200,
    phase=1,
    created="2026-01-01T00:00:00+00:00",
    parts=(Part("state.safetensors", 10, "ab"), Part("more.safetensors", 0, "cd")),
    skeleton={"dict": {"ünï": [1, -0.0, None, True, {"tuple": []}]}},
    weights_digest="ef",
    job={"seed": 7, "order": {"b": 1, "a": 2}},
    environment={},
    metrics={"loss": 0.1},
)


def test_comes_back_equal_and_in_order() -> None:
    again = Manifest.from_json(MANIFEST.to_json())
    assert again == MANIFEST
    assert list(again.job["order"]) == ["b", "a"]
    assert again.cursor == Cursor(200, Phase.EVALUATED)


def test_is_json_that_any_reader_understands() -> None:
    assert json.loads(MANIFEST.to_json())["step"] == 200


def test_every_changed_byte_is_found() -> None:
    text = MANIFEST.to_json()
    for at in range(len(text)):
        with pytest.raises(CheckpointError):
            Manifest.from_json(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        with pytest.raises(CheckpointError):
            Manifest.from_json(text[:at])


def test_a_sound_document_of_another_kind_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Longer(Manifest):
        surprise: int = 1

    longer = Longer(**{field.name: getattr(MANIFEST, field.name) for field in dataclasses.fields(MANIFEST)})
    with pytest.raises(CheckpointError, match=r"of another kind.*surprise"):
        Manifest.from_json(longer.to_json())


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(CheckpointError, match="phase is 7"):
        dataclasses.replace(MANIFEST, phase=7)
