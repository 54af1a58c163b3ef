"""From what a job goes on when nobody holds its state: the newest whole checkpoint, or nothing if none was saved."""

from pathlib import Path

import pytest

from checkpoint.whole_save import save_whole
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder, Loaded
from quorate.core.errors import CheckpointError, LinkError
from quorate.core.failure import CHECKPOINT_LOST, JobFailed
from quorate.supervisor.supervisor import find_newest
from quorate.worker.restore import load_meant, newest_instead


def save(folder: Path, step: int) -> Path:
    return save_whole(CheckpointFolder(folder), {"step": step}, step=step, weights_digest="w").path


def damage(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("{")


def test_one_that_is_damaged_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    whole, damaged = save(tmp_path, 4), save(tmp_path, 8)
    damage(damaged)
    assert find_newest(CheckpointFolder(tmp_path), None, saved=8) == whole


def test_one_of_another_job_is_passed_over_unless_there_is_no_other(tmp_path: Path) -> None:
    own, other = save(tmp_path, 4), save(tmp_path, 8)
    folder = CheckpointFolder(tmp_path)
    assert find_newest(folder, None, 4, lambda info: "another" if info.path == other else "") == own
    assert find_newest(folder, None, 4, lambda _: "another") == other


def test_a_job_that_has_never_saved_begins_again(tmp_path: Path) -> None:
    assert find_newest(CheckpointFolder(tmp_path / "none yet"), None, saved=None) is None


def test_a_branch_that_has_not_saved_yet_goes_back_to_where_it_began(tmp_path: Path) -> None:
    origin = save(tmp_path / "origin", 4)
    assert find_newest(CheckpointFolder(tmp_path / "branch"), origin, saved=None) == origin


@pytest.mark.parametrize("saved", [8, None])
def test_where_none_is_whole_any_more_the_job_ends(tmp_path: Path, saved: int | None) -> None:
    damage(save(tmp_path, 8))
    with pytest.raises(JobFailed, match=r"no valid checkpoint in .*; step-00000008: .*rather than begin again") as told:
        find_newest(CheckpointFolder(tmp_path), None, saved)
    assert (told.value.failure.kind, told.value.failure.step) == (CHECKPOINT_LOST, saved)


def test_where_the_beginning_is_gone_the_job_ends(tmp_path: Path) -> None:
    for folder in (tmp_path / "own", tmp_path / "of another run"):
        with pytest.raises(JobFailed, match="what the job began from can no longer be read"):
            find_newest(CheckpointFolder(tmp_path / "own"), folder / "step-00000004", saved=None)


def test_a_replacement_whose_checkpoint_was_removed_takes_the_newest_or_makes_room(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "of another run"
    newest, foreign, gone = save(own, 8), save(own, 12), own / "step-00000004"

    def why_foreign(info: CheckpointInfo) -> str:
        return "another" if info.path == foreign else ""

    assert newest_instead(gone, CheckpointFolder(own), own, why_foreign).path == newest
    save(other, 8)
    for folder in (other, tmp_path / "empty"):
        with pytest.raises(LinkError, match="is no longer there"):
            newest_instead(folder / "step-00000004", CheckpointFolder(folder), own, why_foreign)


def test_a_checkpoint_that_is_removed_while_a_worker_reads_it_is_as_one_that_was_gone_before(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    meant = save(tmp_path, 4)

    def load(info: CheckpointInfo) -> Loaded:
        """Others go on in the very moment, and remove what they need no longer."""
        if info.path == meant:
            save(tmp_path, 8)
            folder.remove(meant)
        return folder.load(info)

    info, loaded = load_meant(meant, folder, load, lambda: newest_instead(meant, folder, tmp_path, lambda _: ""))
    assert (info.cursor.step, loaded.state) == (8, {"step": 8})
    meant = save(tmp_path, 4)
    with pytest.raises(CheckpointError, match="removed while this job was starting"):
        load_meant(meant, folder, load, None)


def test_a_checkpoint_that_is_damaged_is_told_and_not_passed_over(tmp_path: Path) -> None:
    meant = save(tmp_path, 4)
    folder = CheckpointFolder(tmp_path)

    def load(info: CheckpointInfo) -> Loaded:
        damage(meant)
        return folder.load(info)

    with pytest.raises(CheckpointError, match="step-00000004"):
        load_meant(meant, folder, load, None)


def test_what_may_be_wrong_is_set_aside_and_without_any_other_the_job_begins_again(tmp_path: Path) -> None:
    kept, later = save(tmp_path, 4), save(tmp_path, 8)
    folder = CheckpointFolder(tmp_path)
    folder.set_aside(4)
    folder.set_aside(4)
    assert find_newest(folder, None, saved=8) == kept
    assert not later.exists()
    assert [each.name[:26] for each in tmp_path.glob(".distrusted-*")] == [".distrusted-step-00000008-"]
    save(tmp_path, 8)  # as it is computed again
    folder.set_aside(0)
    assert find_newest(folder, None, saved=8) is None


def test_one_that_cannot_be_set_aside_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 4)

    def refuse(*_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("quorate.checkpoint.store.move_into_place", refuse)
    with pytest.raises(CheckpointError, match=r"cannot set aside .*Permission denied"):
        CheckpointFolder(tmp_path).set_aside(0)
