import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.disk import NEEDING_SPACE, Disk, full, killed
from checkpoint.only_part import part_of
from checkpoint.whole_save import save_whole
from quorate.checkpoint import store as store_module
from quorate.checkpoint.listing import CheckpointInfo, newest_generation, survey
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.retention import Retention
from quorate.checkpoint.store import CheckpointFolder, remove_surplus
from quorate.core.errors import CheckpointError, LeaseExpired
from quorate.core.generation import Cursor, Phase
from quorate.spec.job import CheckpointSpec
from small_disk import small_disk


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.arange(64.0) * step, "bias": torch.full((3,), step)}, "epoch": step}


def save(folder: CheckpointFolder, step: int, phase: Phase = Phase.TRAINED, **changed: Any) -> CheckpointInfo:
    told: dict[str, Any] = {
        "weights_digest": f"weights of {step}",
        "job": {"seed": 7},
        "environment": {"torch": "2"},
        "metrics": {"loss": 0.5},
    }
    return save_whole(folder, state_of(step), step=step, phase=int(phase), **(told | changed))


def assert_is_whole(folder: CheckpointFolder, cursor: Cursor) -> None:
    info = next(info for info in folder.list() if info.cursor == cursor)
    loaded = folder.load(info)
    expected = state_of(cursor.step)
    assert torch.equal(loaded.state["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(loaded.state["model"]["bias"], expected["model"]["bias"])
    assert loaded.state["epoch"] == cursor.step


def entries(folder: CheckpointFolder) -> list[str]:
    return sorted(entry.name for entry in folder.folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


class TestSave:
    def test_comes_back_with_all_that_was_told(self, folder: CheckpointFolder) -> None:
        saved = save(folder, 200)
        info = folder.search().newest
        assert info is not None
        assert saved.path == info.path == folder.folder / "step-00000200"
        assert saved.bytes == info.bytes > 64 * 4
        manifest = folder.load(info).manifest
        assert (manifest.step, manifest.phase, manifest.weights_digest) == (200, 0, "weights of 200")
        assert (manifest.job, manifest.environment, manifest.metrics) == ({"seed": 7}, {"torch": "2"}, {"loss": 0.5})
        assert_is_whole(folder, Cursor(200))

    def test_both_phases_of_a_step_are_kept_and_the_evaluated_is_the_newer(self, folder: CheckpointFolder) -> None:
        save(folder, 200, Phase.EVALUATED)
        save(folder, 200)
        save(folder, 3)
        assert entries(folder) == ["step-00000003", "step-00000200", "step-00000200-evaluated"]
        assert [info.cursor for info in folder.list()] == [Cursor(3), Cursor(200), Cursor(200, Phase.EVALUATED)]

    @pytest.mark.parametrize("late", [(1, 9), (2, 3)], ids=["of an earlier coordinator", "of an earlier generation"])
    def test_a_writer_that_was_replaced_and_comes_late_commits_nothing(
        self, folder: CheckpointFolder, late: tuple[int, int]
    ) -> None:
        draft = Manifest(5, 0, "", (), {"dict": {}}, "weights", {}, {}, {})

        def begun(step: int, generation: tuple[int, int] | None) -> tuple[str, Manifest]:
            attempt = folder.open(Cursor(step))
            attempt.write(0, 1, [b"content"])
            return attempt.name, replace(draft, step=step, generation=generation)

        one_before, old, new, next_one = begun(4, late), begun(5, late), begun(6, (2, 4)), begun(7, (2, 4))
        folder.commit(*one_before, lambda: None)
        folder.commit(*new, lambda: None)
        with pytest.raises(CheckpointError, match=rf"step 5 is not committed: generation 2\.4 .* {late[0]}\.{late[1]}"):
            folder.commit(*old, lambda: None)
        folder.commit(*next_one, lambda: None)
        assert [info.cursor.step for info in folder.list()] == [4, 6, 7]
        assert newest_generation(folder.folder) == (2, 4)

    def test_a_planted_generation_beyond_belief_stops_nobody(self, folder: CheckpointFolder) -> None:
        planted, honest = save(folder, 5), save(folder, 6)
        for info, generation in ((planted, (2**53, 1)), (honest, (7, 2))):
            manifest = replace(info.manifest, generation=generation)
            (info.path / "manifest.json").write_text(manifest.to_json())
        assert newest_generation(folder.folder) == (7, 2), "or the next would be one that no reader takes"
        attempt = folder.open(Cursor(9))
        attempt.write(0, 1, [b"content"])
        draft = Manifest(9, 0, "", (), {"dict": {}}, "weights", {}, {}, {}, generation=(8, 1))
        folder.commit(attempt.name, draft, lambda: None)
        assert [info.cursor.step for info in folder.list()] == [5, 6, 9]

    def test_a_damaged_one_is_replaced(self, folder: CheckpointFolder) -> None:
        part_of(save(folder, 1).path).unlink()
        save(folder, 1)
        assert_is_whole(folder, Cursor(1))
        assert entries(folder) == ["step-00000001"]

    def test_a_file_in_its_place_is_replaced(self, folder: CheckpointFolder) -> None:
        folder.folder.mkdir()
        (folder.folder / "step-00000001").write_text("not a folder")
        save(folder, 1)
        assert_is_whole(folder, Cursor(1))
        assert entries(folder) == ["step-00000001"]

    def test_whoever_may_not_act_any_more_commits_nothing_and_removes_nothing(self, folder: CheckpointFolder) -> None:
        def refuse() -> None:
            raise LeaseExpired("over")

        save(folder, 1)
        save(folder, 2)
        with pytest.raises(LeaseExpired):
            save(folder, 3, check=refuse)
        with pytest.raises(LeaseExpired):
            remove_surplus(folder, Retention(1), None, Cursor(2), check=refuse)
        assert entries(folder) == ["step-00000001", "step-00000002"]

    def test_leftovers_are_no_checkpoints_and_are_removed(self, folder: CheckpointFolder) -> None:
        whole = save(folder, 1).path
        for leftover in (".writing-step-00000002-abcd", ".removing-step-00000001-abcd"):
            shutil.copytree(whole, folder.folder / leftover)
        (folder.folder / "step-00000002.old").mkdir()
        (folder.folder / "step-000000001").mkdir()
        assert [info.cursor for info in folder.list()] == [Cursor(1)]
        save(folder, 2)
        assert entries(folder) == ["step-000000001", "step-00000001", "step-00000002", "step-00000002.old"]

    def test_what_cannot_be_saved_is_named_and_leaves_nothing(self, folder: CheckpointFolder) -> None:
        with pytest.raises(CheckpointError, match=r"optimizer\.hook: cannot save a function"):
            save_whole(folder, {"optimizer": {"hook": save}}, step=1)
        with pytest.raises(CheckpointError, match="cannot be written as JSON"):
            save(folder, 1, metrics={"loss": torch.tensor(1.0)})
        assert entries(folder) == []

    def test_loaded_tensors_outlive_the_file(self, folder: CheckpointFolder) -> None:
        path = save(folder, 1).path
        state = folder.load(folder.list()[0]).state
        with part_of(path).open("r+b") as file:
            file.write(bytes(2048))
        assert torch.equal(state["model"]["weight"], torch.arange(64.0))


class TestTheWriterDies:
    """At every call that changes the disk, by SIGKILL, before the call or in the middle of a write."""

    @pytest.mark.parametrize(
        "half_written", [pytest.param(False, id="before", marks=pytest.mark.long), pytest.param(True, id="half-way")]
    )
    def test_while_it_saves_and_prunes(self, tmp_path: Path, half_written: bool) -> None:
        def save_and_prune(folder: CheckpointFolder) -> None:
            save(folder, 2)
            remove_surplus(folder, Retention(1), None, Cursor(2))

        moments = self._each_moment(tmp_path, save_and_prune, half_written, lambda folder: None)
        newest = [folder.search().newest for folder in moments]
        steps = [info.cursor.step for info in newest if info is not None]
        assert len(steps) == len(newest)
        assert steps == sorted(steps)
        assert set(steps) == {1, 2}

    def test_while_it_replaces_a_damaged_one(self, tmp_path: Path) -> None:
        def damage(folder: CheckpointFolder) -> None:
            part_of(save(folder, 2).path).write_bytes(b"damaged")

        moments = self._each_moment(tmp_path, lambda folder: save(folder, 2), False, damage)
        newest = [folder.search().newest for folder in moments]
        assert {info.cursor.step for info in newest if info is not None} == {1, 2}
        assert None not in newest

    def _each_moment(
        self,
        tmp_path: Path,
        write: Callable[[CheckpointFolder], object],
        half_written: bool,
        prepare: Callable[[CheckpointFolder], object],
    ) -> Iterator[CheckpointFolder]:
        template = CheckpointFolder(tmp_path / "template")
        save(template, 1)
        prepare(template)
        damaged_before = [skipped.path.name for skipped in template.search().skipped]
        call = 0
        while True:
            folder = CheckpointFolder(tmp_path / f"killed-at-{call}")
            shutil.copytree(template.folder, folder.folder)
            if not killed(lambda folder=folder: write(folder), call, half_written):  # type: ignore[misc]
                assert call > 10
                return
            # One that was damaged before may still lie there, or be whole by now.
            damaged = [skipped.path.name for skipped in folder.search().skipped if skipped.path.name in damaged_before]
            self._assert_only_whole_ones(folder, damaged)
            yield folder
            save(folder, 3)
            assert not [name for name in entries(folder) if name.startswith(".")]
            assert_is_whole(folder, Cursor(3))
            call += 1

    def _assert_only_whole_ones(self, folder: CheckpointFolder, damaged: list[str]) -> None:
        listed = [info for info in folder.list() if info.path.name not in damaged]
        assert listed
        for info in listed:
            assert_is_whole(folder, info.cursor)


class TestPowerIsCut:
    def test_everything_is_on_the_disk_before_the_final_name(self, folder: CheckpointFolder) -> None:
        synced: set[int] = set()
        at_rename: list[set[int]] = []

        def watch(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "fsync":
                synced.add(os.fstat(arguments[0]).st_ino)
            else:
                place = Path(arguments[0])
                inside = place.iterdir() if place.is_dir() else ()
                at_rename.append({entry.stat().st_ino for entry in (place, *inside)} - synced)

        class Watcher(Disk):
            def _watch(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any) -> Any:
                    watch(name, arguments)
                    self.calls.append(name)
                    return real(*arguments)

                return call

        with Watcher().watched(("fsync", "rename")) as disk:
            save(folder, 1)
        assert at_rename == [set(), set()], "the part gets its name, and then the checkpoint"
        assert disk.calls[-2:] == ["rename", "fsync"]
        assert folder.folder.stat().st_ino in synced


class TestTheDiskIsFull:
    def test_at_any_call_it_is_told_and_the_space_given_back(self, tmp_path: Path) -> None:
        with Disk().watched(NEEDING_SPACE) as undisturbed:
            save(CheckpointFolder(tmp_path / "undisturbed"), 1)
        failures = 0
        for call in range(len(undisturbed.calls)):
            folder = CheckpointFolder(tmp_path / f"full-at-{call}")
            with Disk(call, full).watched(NEEDING_SPACE), pytest.raises(CheckpointError, match="No space left") as told:
                save(folder, 1)
            assert str(folder.folder) in str(told.value)
            assert "bytes and" in str(told.value)
            if folder.folder.exists():
                assert not [name for name in entries(folder) if name.startswith(".")]
            for info in folder.list():
                assert_is_whole(folder, info.cursor)
            save(folder, 1)
            assert_is_whole(folder, Cursor(1))
            failures += 1
        assert failures > 6

    def test_for_real(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "small", "256k") as place:
            folder = CheckpointFolder(place / "checkpoints")
            save(folder, 1)
            free = shutil.disk_usage(place).free
            large = {"model": torch.zeros(1_000_000)}
            with pytest.raises(CheckpointError, match=rf"needs 4,000,\d+ bytes and {free:,} are free"):
                save_whole(folder, large, step=2)
            assert shutil.disk_usage(place).free == free
            assert entries(folder) == ["step-00000001"]
            assert_is_whole(folder, Cursor(1))

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
    def test_a_folder_that_cannot_be_written_is_told(
        self, folder: CheckpointFolder, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "mkdir", refuse)
        with pytest.raises(CheckpointError, match=rf"{os.strerror(number)}.*writable.*`runs`"):
            save(folder, 1)

    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
    def test_trouble_that_no_permission_mends_is_told_without_one(
        self, folder: CheckpointFolder, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "mkdir", refuse)
        with pytest.raises(CheckpointError) as raised:
            save(folder, 1)
        told = str(raised.value)
        assert os.strerror(number) in told and told.endswith("Choose another folder with `runs`.")
        assert "writable" not in told


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


Damage = Callable[[Path], object]
MANIFEST = "manifest.json"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "part flipped at its start": (lambda p: flip(part_of(p), 0), "safetensors is damaged"),
    "part flipped in the middle": (lambda p: flip(part_of(p), 0.5), "safetensors is damaged"),
    "part flipped at its end": (lambda p: flip(part_of(p), 1), "safetensors is damaged"),
    "part truncated": (lambda p: os.truncate(part_of(p), 100), "truncated: it has 100 bytes and the manifest says"),
    "part emptied": (lambda p: os.truncate(part_of(p), 0), "truncated: it has 0 bytes"),
    "part too long": (lambda p: os.truncate(part_of(p), 9999), "too long: it has 9,999 bytes"),
    "part missing": (lambda p: part_of(p).unlink(), "safetensors is missing"),
    "part is a folder": (lambda p: make_folder(part_of(p)), "cannot be read"),
    "part of another": (
        lambda p: shutil.copy(part_of(p.parent / "step-00000001"), part_of(p)),
        "of another checkpoint",
    ),
    "manifest of another": (
        lambda p: shutil.copy(p.parent / "step-00000001" / MANIFEST, p),
        "of another checkpoint, step-00000001",
    ),
    "manifest missing": (lambda p: (p / MANIFEST).unlink(), "cannot read manifest.json: No such file"),
    "a FIFO for a part": (lambda p: fifo(part_of(p)), "cannot be read: a FIFO is in the place of the file"),
    "a FIFO for the manifest": (lambda p: fifo(p / MANIFEST), "cannot read manifest.json: a FIFO is in the place"),
    "manifest torn": (lambda p: os.truncate(p / MANIFEST, 200), "not JSON"),
    "manifest empty": (lambda p: os.truncate(p / MANIFEST, 0), "not JSON"),
    "manifest edited": (lambda p: edit(p / MANIFEST, '"seed": 7', '"seed": 8'), "differs from its own digest"),
    "manifest spaced": (lambda p: edit(p / MANIFEST, '"seed": 7', '"seed":  7'), "differs from its own digest"),
    "manifest with its format edited": (
        lambda p: edit(p / MANIFEST, '"format": 3', '"format": 4'),
        "differs from its own digest",
    ),
    "manifest foreign": (lambda p: (p / MANIFEST).write_text('{"name": "other"}'), "format None"),
    "manifest not an object": (lambda p: (p / MANIFEST).write_text("[1]"), "is a list"),
    "manifest not text": (lambda p: (p / MANIFEST).write_bytes(b"\xff\xfe\x00"), "cannot read manifest.json"),
}


class TestVerify:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_finds_and_names(self, folder: CheckpointFolder, damage: str) -> None:
        save(folder, 1)
        path = save(folder, 2).path
        newest = folder.search().newest
        assert newest is not None
        folder.verify(newest)
        spoil, words = DAMAGES[damage]
        spoil(path)
        with pytest.raises(CheckpointError, match=words) as told:
            folder.verify(newest)
        assert str(path) in str(told.value)
        with pytest.raises(CheckpointError, match=words):
            folder.load(newest)

        search = folder.search()
        assert search.newest is not None
        assert search.newest.cursor == Cursor(1)
        reason = str(told.value).removeprefix(f"checkpoint {path}: ")
        assert [(skipped.path, skipped.reason) for skipped in search.skipped] == [(path, reason)]
        assert_is_whole(folder, Cursor(1))

    def test_every_flipped_byte_is_found(self, folder: CheckpointFolder) -> None:
        path = save(folder, 2).path
        (info,) = folder.list()
        for file in (part_of(path), path / MANIFEST):
            whole = file.read_bytes()
            for at in range(len(whole)):
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                with pytest.raises(CheckpointError):
                    folder.verify(info)
            file.write_bytes(whole)
        folder.verify(info)

    def test_nothing_there(self, folder: CheckpointFolder) -> None:
        assert folder.list() == ()
        assert folder.search().newest is None
        assert remove_surplus(folder, Retention(1), None, None) == ()

    def test_needs_no_torch(self, folder: CheckpointFolder) -> None:
        save(folder, 1)
        script = (
            "import sys; from pathlib import Path; from quorate.checkpoint.store import CheckpointFolder;"
            "print(CheckpointFolder(Path(sys.argv[1])).search().newest.cursor.step, 'torch' in sys.modules)"
        )
        command = [sys.executable, "-c", script, str(folder.folder)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1 False\n"


class TestPrune:
    def test_makes_room_for_one_that_is_coming_but_never_by_the_newest_whole_or_a_newer_one(
        self, folder: CheckpointFolder
    ) -> None:
        for step in range(1, 6):
            save(folder, step)
        remove_surplus(folder, Retention(1), 2, Cursor(4), coming=Cursor(6))
        assert [info.cursor.step for info in folder.list()] == [2, 4, 5]

    def test_removes_nothing_where_none_is_known_to_be_whole(self, folder: CheckpointFolder) -> None:
        for step in (1, 2):
            save(folder, step)
        assert remove_surplus(folder, Retention(1), None, None) == remove_surplus(folder, Retention(1), None, Cursor(9))
        assert [info.cursor.step for info in folder.list()] == [1, 2]

    def test_a_search_finds_what_is_saved_while_it_looks(
        self, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A running job saves another and removes the one that is being read: that is not nothing."""
        verify, old = CheckpointFolder.verify, save(folder, 2)

        def verify_late(self: CheckpointFolder, info: CheckpointInfo) -> None:
            if info.path == old.path and old.path.exists():
                save(folder, 4)
                folder.remove(old.path)
            verify(self, info)

        monkeypatch.setattr(CheckpointFolder, "verify", verify_late)
        found = folder.search()
        assert found.newest is not None
        assert (found.newest.cursor, found.skipped) == (Cursor(4), ())

    def test_never_removes_the_only_whole_one(self, folder: CheckpointFolder) -> None:
        for step in range(1, 5):
            save(folder, step)
        for step in (3, 4):
            flip(part_of(folder.folder / f"step-{step:08d}"), 0.5)
        assert [info.cursor.step for info in remove_surplus(folder, Retention(1), None, Cursor(2))] == [1, 3]
        assert [info.cursor.step for info in folder.list()] == [2, 4]
        assert_is_whole(folder, Cursor(2))

    def test_one_that_cannot_be_removed_does_not_keep_the_others(
        self, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for step in range(1, 4):
            save(folder, step)
        real = os.rename

        def refuse_the_first(source: Path, target: Path) -> None:
            if source.name == "step-00000001":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            real(source, target)

        monkeypatch.setattr(os, "rename", refuse_the_first)
        assert [info.cursor.step for info in remove_surplus(folder, Retention(1), None, Cursor(3))] == [2]
        assert "step-00000001: Read-only file system" in caplog.text


def test_a_checkpoint_that_is_removed_while_another_worker_begins_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CheckpointFolder(tmp_path), 1)

    def removed_since(folder: Path) -> Any:
        found = survey(folder)
        shutil.rmtree(folder / "step-00000001")
        monkeypatch.setattr(Path, "is_dir", lambda _: True)  # it goes just after that was looked at
        return found

    monkeypatch.setattr(store_module, "survey", removed_since)
    assert CheckpointFolder.of_job(tmp_path, CheckpointSpec()).folder == tmp_path
