"""What is done with the checkpoints of a run whose folder somebody else can write to."""

from pathlib import Path

import pytest

from quorate.api.checkpoints import NO_KEY, remove_from_run, verify_run
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, RunError
from quorate.encryption.key import read_key, rekey, rekey_run
from stores.copied_run import Encrypted, make_source


@pytest.fixture
def encrypted(tmp_path: Path) -> Encrypted:
    return Encrypted(tmp_path)


def second_key(tmp_path: Path) -> dict[str, str | None]:
    (tmp_path / "second").write_text("cd" * 32)
    return {"key_file": str(tmp_path / "second"), "key_env": None}


def test_another_key_does_not_vouch_for_what_was_planted(
    encrypted: Encrypted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, new = encrypted.source.run, second_key(tmp_path)
    name = encrypted.plant(9, run.checkpoints)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=f"nothing is rewritten: the key of run .* does not authenticate {name}"):
        rekey_run(run, new)
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path != run.lock_file}
    assert after == {path: content for path, content in before.items() if path != run.lock_file}
    assert len(rekey_run(run, new, include_untrusted=True)) == 3
    assert f"{name} is taken on trust: " in caplog.text


def test_nor_where_the_job_was_edited_to_name_no_key(encrypted: Encrypted, tmp_path: Path) -> None:
    run = encrypted.source.run
    name = encrypted.plant(9, run.checkpoints)
    run.write_job(run.job_file.read_text().partition("checkpoint:")[0])
    with pytest.raises(CheckpointError, match=f"does not authenticate {name}"):
        rekey_run(run, second_key(tmp_path))


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_one_that_died_is_repeated_without_a_further_word(tmp_path: Path, is_encrypted: bool) -> None:
    """Some have the new key already, and the job does not say so yet."""
    encrypted = Encrypted(tmp_path) if is_encrypted else None
    source = make_source(tmp_path / "plain", 2, 4) if encrypted is None else encrypted.source
    old = None if encrypted is None else read_key(encrypted.place)
    new = second_key(tmp_path)
    first, second = CheckpointFolder(source.run.checkpoints).list()
    with source.run.lock():
        assert rekey(first, read_key(new), new, old)
    assert rekey_run(source.run, new) == (second.path.name,)


def test_verify_says_whether_it_was_asked_who_wrote_them(encrypted: Encrypted, tmp_path: Path) -> None:
    run = encrypted.source.run
    name = encrypted.plant(9, run.checkpoints)
    with_key = verify_run(run)
    assert with_key.not_authenticated == ""
    assert [each.path.name for each in with_key.examined if each.problem] == [name]
    encrypted.key.unlink()
    without = verify_run(run)
    assert "cannot read the key file" in without.not_authenticated
    assert not any(each.problem for each in without.examined), "whole, and that is all that is known"
    plain = make_source(tmp_path / "plain", 2)
    assert verify_run(plain.run).not_authenticated == NO_KEY


def test_what_was_planted_is_no_way_back_when_the_last_good_one_is_to_be_removed(encrypted: Encrypted) -> None:
    run = encrypted.source.run
    encrypted.plant(9, run.checkpoints)
    with pytest.raises(RunError, match="has no valid checkpoint left"):
        remove_from_run(run, ["2", "4"], force=False)
    assert len(CheckpointFolder(run.checkpoints).list()) == 3
