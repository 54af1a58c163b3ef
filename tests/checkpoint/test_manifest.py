import dataclasses
import json
from typing import Any

import pytest

from quorate.checkpoint.manifest import Manifest, Part
from quorate.core.digests import content_digest
from quorate.core.errors import CheckpointError
from quorate.core.generation import Cursor, Phase
from sealing import cipher

MANIFEST = Manifest(
    step=200,
    phase=1,
    created="2026-01-01T00:00:00+00:00",
    parts=(
        Part(f"1-of-2.{'ab' * 16}.safetensors", 10, "xxh3-128:ab"),
        Part(f"2-of-2.{'cd' * 32}.safetensors.enc", 0, "sha-256:cd"),
    ),
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


def foreign(**changed: Any) -> str:
    """A manifest with a fitting digest that none of ours has written."""
    content = json.loads(MANIFEST.to_json())
    del content["digest"]
    rest = json.dumps({**content, **changed})[1:]
    return f'{{"digest": "{content_digest(rest.encode())}",\n' + rest


NAME = MANIFEST.parts[0].file
PART = {"file": "state.safetensors", "bytes": 1, "digest": "xxh3-128:ab"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(
            ({"parts": [{**PART, "file": name}]}, "not the name of a part")
            for name in (
                "a\0b",
                "..",
                "a/b",
                "",
                "a\\b",
                "ü",
                "evil.py",
                "__init__.py",
                "manifest.json",
                "origin.json",
                f"../{NAME}",
                f"{NAME}\n",
                f"{NAME}.py",
                f"{NAME}/",
                f"x{NAME}",
                NAME.replace("1", "١"),
                f"1-of-2.{'ab' * 16}.py",
                "1-of-1.safetensors",
                "STATE.safetensors",
            )
        ),
        ({"parts": [{**PART, "file": 5}]}, "file of a part is the int 5"),
        ({"parts": [{**PART, "bytes": "12"}]}, 'size of part state.safetensors is the text "12"'),
        ({"parts": [{**PART, "bytes": -1}]}, "size of part state.safetensors is -1"),
        ({"parts": [{**PART, "bytes": True}]}, "size of part state.safetensors is the bool True"),
        ({"parts": [{**PART, "digest": None}]}, "digest of part state.safetensors is nothing"),
        ({"parts": [5]}, "a part is the int 5"),
        ({"parts": {}}, "parts is a dict"),
        ({"parts": "parts"}, "parts is the text"),
        ({"step": "200"}, 'step is the text "200"'),
        ({"step": -1}, "step is -1"),
        ({"phase": True}, "phase is the bool True"),
        ({"phase": 7}, "phase is 7"),
        ({"created": 5}, "created is the int 5"),
        ({"weights_digest": None}, "weights_digest is nothing"),
        ({"job": []}, "job is a list"),
        ({"metrics": {"loss": "low"}}, "metric 'loss' is the text"),
        ({"encryption": "rot13"}, "encryption is the text"),
        ({"encryption": {"key": 5}}, "encryption.key is the int 5"),
    ],
)
def test_a_foreign_one_with_a_fitting_digest_is_refused(changed: dict[str, Any], words: str) -> None:
    assert Manifest.from_json(foreign()) == MANIFEST
    with pytest.raises(CheckpointError, match=words):
        Manifest.from_json(foreign(**changed))


class TestEncrypted:
    def test_comes_back_and_shows_nothing_of_the_skeleton(self) -> None:
        text = MANIFEST.sealed(cipher()).to_json()
        assert "tuple" not in text
        assert "\\u00fcn\\u00ef" in MANIFEST.to_json()
        assert "\\u00fcn\\u00ef" not in text
        again = Manifest.from_json(text)
        assert again.encryption == {"cipher": "aes-256-gcm", "key": cipher().key_id}
        assert again.opened(cipher()) == MANIFEST

    def test_in_plain_it_is_left_as_it_is(self) -> None:
        assert MANIFEST.opened(None) is MANIFEST
        assert MANIFEST.opened(cipher()) is MANIFEST

    def test_without_the_key_it_stays_shut(self) -> None:
        sealed = MANIFEST.sealed(cipher())
        with pytest.raises(CheckpointError, match="no key is given"):
            sealed.opened(None)
        with pytest.raises(CheckpointError, match=r"step 200 cannot be decrypted.*the key given is"):
            sealed.opened(cipher(bytes(32)))

    @pytest.mark.parametrize(
        "change",
        [
            {"step": 201},
            {"phase": 0},
            {"weights_digest": "00"},
            {"parts": MANIFEST.parts[:1]},
            {"parts": MANIFEST.parts[::-1]},
            {"parts": (dataclasses.replace(MANIFEST.parts[0], digest="xxh3-128:ac"), MANIFEST.parts[1])},
        ],
    )
    def test_it_belongs_to_its_parts_and_to_no_others(self, change: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match=r"cannot be decrypted.*not authentic"):
            dataclasses.replace(MANIFEST.sealed(cipher()), **change).opened(cipher())

    @pytest.mark.parametrize("skeleton", [None, {"dict": {}}, "not base64!", "ünï"])
    def test_a_skeleton_that_is_not_encrypted_is_refused(self, skeleton: Any) -> None:
        with pytest.raises(CheckpointError, match="not encrypted as the manifest says"):
            dataclasses.replace(MANIFEST.sealed(cipher()), skeleton=skeleton).opened(cipher())
