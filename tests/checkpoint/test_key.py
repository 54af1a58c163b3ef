import base64
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from quorate.checkpoint.manifest import Manifest
from quorate.core.errors import CheckpointError, UntrustedError
from quorate.encryption.cipher import Cipher
from quorate.encryption.key import cipher_of, read_key
from quorate.encryption.option import EncryptSpec

KEY = bytes(range(200, 232))
CIPHER = Cipher(KEY)
PLAIN = Manifest(
    step=7,
    phase=0,
    created="2026-01-01T00:00:00+00:00",
    parts=(),
    skeleton={"dict": {}},
    weights_digest="ef",
    job={},
    environment={},
    metrics={},
)
TEXTS = {
    "hex": KEY.hex(),
    "hex in capitals, on a line": KEY.hex().upper() + "\n",
    "base64": base64.b64encode(KEY).decode(),
    "base64 for URLs": base64.urlsafe_b64encode(KEY).decode(),
    "base64 without padding": base64.b64encode(KEY).decode().rstrip("="),
}
WRONG = {
    "empty": "",
    "too short": KEY[:16].hex(),
    "too long": (KEY + KEY).hex(),
    "half a byte": KEY.hex()[:-1],
    "base64 of less": base64.b64encode(KEY[:24]).decode(),
    "no text for a key": "correct horse battery staple, and more",
}


def encrypted(**encrypt: Any) -> Manifest:
    return dataclasses.replace(PLAIN, job={"checkpoint": {"encrypt": encrypt or None}}).sealed(CIPHER)


def untagged(manifest: Manifest, **changed: Any) -> Manifest:
    return dataclasses.replace(manifest, tag="", **changed)


class TestRead:
    @pytest.mark.parametrize("form", TEXTS)
    def test_from_a_variable_and_from_a_file(self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAMPLE_KEY", TEXTS[form])
        assert read_key({"key_env": "SAMPLE_KEY"}).key_id == CIPHER.key_id
        file = tmp_path / "key"
        file.write_text(TEXTS[form])
        assert read_key({"key_file": str(file), "key_env": None}).key_id == CIPHER.key_id

    def test_from_a_file_of_32_bytes(self, tmp_path: Path) -> None:
        file = tmp_path / "key"
        file.write_bytes(KEY)
        assert read_key(EncryptSpec(key_file=str(file))).key_id == CIPHER.key_id

    @pytest.mark.parametrize("form", WRONG)
    def test_what_is_no_key_is_refused_and_not_shown(
        self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        monkeypatch.setenv("SAMPLE_KEY", WRONG[form])
        with pytest.raises(CheckpointError, match=r"variable SAMPLE_KEY holds \d+ bytes.*openssl rand") as of_variable:
            read_key({"key_env": "SAMPLE_KEY"})
        file = tmp_path / "key"
        file.write_text(WRONG[form])
        with pytest.raises(CheckpointError, match=r"key file .*/key holds \d+ bytes.*openssl rand") as of_file:
            read_key({"key_file": str(file)})
        told = "".join(f"{each.getrepr(style='short')}" for each in (of_variable, of_file)) + caplog.text
        assert WRONG[form] == "" or WRONG[form] not in told
        assert of_file.value.__cause__ is None

    def test_nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SAMPLE_KEY", raising=False)
        with pytest.raises(CheckpointError, match=r"variable SAMPLE_KEY, .* is not set"):
            read_key({"key_env": "SAMPLE_KEY"})
        with pytest.raises(CheckpointError, match=r"cannot read the key file .*/none: No such file"):
            read_key({"key_file": str(tmp_path / "none")})
        with pytest.raises(CheckpointError, match=r"cannot read the key file .*: Is a directory"):
            read_key({"key_file": str(tmp_path)})
        for source in ({}, {"key_file": "a", "key_env": "B"}):
            with pytest.raises(CheckpointError, match="one of `key_file` and `key_env`"):
                read_key(source)


class TestOfACheckpoint:
    def test_a_plain_one_needs_none(self) -> None:
        assert cipher_of(PLAIN) is None
        assert cipher_of(PLAIN, CIPHER, trusting=True) is None

    def test_found_by_the_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAMPLE_KEY", KEY.hex())
        manifest = encrypted(key_env="SAMPLE_KEY")
        assert manifest.opened(cipher_of(manifest)).skeleton == PLAIN.skeleton

    def test_one_that_is_given_goes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SAMPLE_KEY", raising=False)
        assert cipher_of(encrypted(key_env="SAMPLE_KEY"), CIPHER) is CIPHER

    def test_nothing_says_where_it_is(self) -> None:
        with pytest.raises(CheckpointError, match=rf"key {CIPHER.key_id} and its job does not say.*key_file"):
            cipher_of(encrypted())
        with pytest.raises(CheckpointError, match="does not say"):
            cipher_of(untagged(encrypted(), job={}))

    def test_another_key_is_refused_by_its_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other = Cipher(bytes(32))
        words = rf"step 7 is encrypted with key {CIPHER.key_id} and the key given is {other.key_id}"
        with pytest.raises(CheckpointError, match=words):
            cipher_of(encrypted(), other)
        monkeypatch.setenv("SAMPLE_KEY", bytes(32).hex())
        with pytest.raises(CheckpointError, match=words):
            cipher_of(encrypted(key_env="SAMPLE_KEY"))

    def test_whoever_trusts_it_finds_its_key_where_its_own_job_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAMPLE_KEY", KEY.hex())
        found = cipher_of(encrypted(key_env="SAMPLE_KEY"), Cipher(bytes(32)), trusting=True)
        assert found is not None and found.key_id == CIPHER.key_id
        assert cipher_of(untagged(encrypted()), CIPHER, trusting=True) is CIPHER
        monkeypatch.delenv("SAMPLE_KEY")
        with pytest.raises(CheckpointError, match="Give the key that it was written with"):
            cipher_of(encrypted(key_env="SAMPLE_KEY"), Cipher(bytes(32)), trusting=True)

    @pytest.mark.parametrize("job", [{"checkpoint": 5}, {"checkpoint": {"encrypt": 5}}])
    def test_a_foreign_job_says_nothing(self, job: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match="does not say where"):
            cipher_of(untagged(encrypted(), job=job))
        with pytest.raises(CheckpointError, match="one of `key_file` and `key_env`"):
            cipher_of(encrypted(key_file=5))

    def test_an_unknown_cipher_is_refused(self) -> None:
        manifest = dataclasses.replace(PLAIN, encryption={"cipher": "rot13", "key": CIPHER.key_id}).tagged(CIPHER)
        with pytest.raises(CheckpointError, match="by 'rot13' and this version of Quorate knows aes-256-gcm"):
            cipher_of(manifest, CIPHER)


class TestWhatAnybodyMayHaveWritten:
    """Whoever can write where the checkpoints lie, and has not the key."""

    def test_in_plain(self) -> None:
        with pytest.raises(UntrustedError, match=r"step 7 is not encrypted, although .*`quorate checkpoints rekey`"):
            cipher_of(PLAIN, CIPHER)

    def test_under_a_key_of_their_own_which_its_job_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        theirs = Cipher(bytes(32))
        monkeypatch.setenv("THEIR_KEY", bytes(32).hex())
        forged = dataclasses.replace(PLAIN, job={"checkpoint": {"encrypt": {"key_env": "THEIR_KEY"}}}).sealed(theirs)
        with pytest.raises(UntrustedError, match=rf"key {theirs.key_id} and the key given is {CIPHER.key_id}.*rekey"):
            cipher_of(forged, CIPHER)

    def test_without_a_tag_as_earlier_versions_did(self) -> None:
        with pytest.raises(UntrustedError, match=r"by an earlier version of Quorate.*`quorate checkpoints rekey`"):
            cipher_of(untagged(encrypted()), CIPHER)

    @pytest.mark.parametrize("trusting", [False, True])
    @pytest.mark.parametrize(
        "changed",
        [
            {"step": 9},
            {"phase": 1},
            {"created": "2026-01-02T00:00:00+00:00"},
            {"weights_digest": "00"},
            {"job": {"seed": 1}},
            {"environment": {"torch": "0"}},
            {"metrics": {"loss": 0.0}},
            {"best": {"step": 1, "value": 0.0}},
            {"generation": (9, 9)},
            {"tag": "00" * 32},
            {"tag": "ä"},
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_with_one_field_changed(self, changed: dict[str, Any], trusting: bool) -> None:
        assert cipher_of(encrypted(), CIPHER) is CIPHER
        forged = Manifest.from_json(dataclasses.replace(encrypted(), **changed).to_json())
        with pytest.raises(UntrustedError, match="is not authentic"):
            cipher_of(forged, CIPHER, trusting=trusting)
