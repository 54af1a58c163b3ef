import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.checkpoint.listing import checkpoint_name
from quorate.checkpoint.retention import Retention
from quorate.core.errors import QuorateError
from quorate.core.generation import Cursor
from quorate.core.runs_folder import ORIGIN
from quorate.storage.objects import StoreError
from quorate.stores.copier import LONGEST_PAUSE, pause_after, plan_copies
from quorate.stores.place import Contents, FolderPlace, files_of
from quorate.stores.transfer import LEFT_BEHIND, copy_checkpoints, copy_one
from storage.in_time import in_time
from stores.copied_run import infos, make_source

NOW = 1_000_000.0


def named(*steps: int) -> dict[str, dict[str, int]]:
    return {checkpoint_name(Cursor(step)): {f"part-{step}": 10} for step in steps}


class TestErrands:
    def test_copies_what_is_missing_newest_first(self) -> None:
        wanted = plan_copies(named(2, 4, 6), Contents(named(4)), Retention(3), None, NOW)
        assert wanted.copy == ("step-00000006", "step-00000002")
        assert wanted.remove == wanted.sweep == ()

    def test_copies_again_what_differs(self) -> None:
        there = named(2, 4)
        there["step-00000004"] = {"part-4": 9}
        there["step-00000002"] = {}
        wanted = plan_copies(named(2, 4), Contents(there), Retention(3), None, NOW)
        assert wanted.copy == ("step-00000004", "step-00000002")

    def test_removes_what_retention_keeps_neither_here_nor_there(self) -> None:
        wanted = plan_copies(named(4, 6), Contents(named(1, 2, 3, 4, 6)), Retention(2), 2, NOW)
        assert wanted.remove == ("step-00000001", "step-00000003")

    def test_keeps_what_is_here_although_retention_would_not(self) -> None:
        assert not plan_copies(named(1, 2, 3), Contents(named(1, 2, 3)), Retention(1), None, NOW).remove

    def test_a_folder_that_was_emptied_empties_no_place(self) -> None:
        wanted = plan_copies({}, Contents(named(2, 4, 6)), Retention(3), None, NOW)
        assert wanted.remove == wanted.copy == ()

    def test_sweeps_what_nobody_is_at_any_more(self) -> None:
        unfinished = {
            "step-00000002": NOW - LEFT_BEHIND - 1,  # of a copier that died
            "step-00000004": NOW - LEFT_BEHIND + 60,  # perhaps of another that is at it
            "step-00000006": None,  # nobody knows
            "step-00000008": NOW - LEFT_BEHIND - 1,  # is copied again, with what is there already
        }
        wanted = plan_copies(named(8), Contents({}, unfinished), Retention(3), None, NOW)
        assert wanted.sweep == ("step-00000002",)
        assert wanted.copy == ("step-00000008",)

    @given(
        here=st.sets(st.integers(1, 30)),
        there=st.sets(st.integers(1, 30)),
        keep=st.integers(1, 4),
        best=st.none() | st.integers(1, 30),
    )
    def test_comes_to_rest_with_everything_there(
        self, here: set[int], there: set[int], keep: int, best: int | None
    ) -> None:
        local, remote = named(*here), named(*there)
        wanted = plan_copies(local, Contents(remote), Retention(keep), best, NOW)
        after = {name: files for name, files in (remote | local).items() if name not in wanted.remove}
        assert local.items() <= after.items()
        assert not after or max(after) == max(remote | local)
        again = plan_copies(local, Contents(after), Retention(keep), best, NOW)
        assert not again.copy
        later = {name: files for name, files in after.items() if name not in again.remove}
        assert not plan_copies(local, Contents(later), Retention(keep), best, NOW).remove
        assert len(later.keys() - local.keys()) <= keep + (best is not None)


@given(failures=st.integers(1, 10_000), chance=st.floats(0, 1))
def test_pauses_grow_and_have_a_limit(failures: int, chance: float) -> None:
    pause = pause_after(failures, chance)
    assert 0.5 <= pause <= LONGEST_PAUSE
    assert pause <= pause_after(failures + 1, chance)
    assert pause_after(failures, 0.0) < pause_after(failures, 1.0), "not all at the same moment"


def test_copies_what_is_not_there(tmp_path: Path) -> None:
    source = make_source(tmp_path / "runs", 2, 4, 6)
    place = FolderPlace(tmp_path / "backup")
    copy_one(infos(source)["step-00000004"], place)
    assert [copied.name for copied in copy_checkpoints(source, place)] == ["step-00000006", "step-00000002"]
    assert copy_checkpoints(source, place) == ()
    assert place.contents().whole == {name: files_of(info.manifest) for name, info in infos(source).items()}
    assert (tmp_path / "backup" / "job.yaml").read_text() == source.run.job_file.read_text()
    assert (tmp_path / "backup" / "environment.json").exists()


def test_copies_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    """The first run of a job on two machines has the same name."""
    source, other = make_source(tmp_path / "here", 2), make_source(tmp_path / "elsewhere", 4)
    assert source.run.name == other.run.name
    place = FolderPlace(tmp_path / "backup")
    copy_checkpoints(source, place)
    with pytest.raises(StoreError, match="copies of another run of that name") as caught:
        copy_checkpoints(other, place)
    assert caught.value.lasts
    assert set(place.contents().whole) == {"step-00000002"}
    assert place.read(ORIGIN) == source.origin


def test_a_run_without_checkpoints_claims_no_place(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "copy")
    assert copy_checkpoints(make_source(tmp_path), place) == ()
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ["job.yaml", "environment.json"])
def test_a_page_that_is_a_pipe_is_told_at_once(tmp_path: Path, name: str) -> None:
    source = make_source(tmp_path, 2)
    (source.run.path / name).unlink()
    os.mkfifo(source.run.path / name)
    with in_time(), contextlib.suppress(QuorateError, OSError):
        assert name not in source.pages()
