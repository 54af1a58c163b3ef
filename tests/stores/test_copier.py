import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.only_part import part_of
from command import await_condition
from quorate.checkpoint.manifest import Manifest, Part
from quorate.checkpoint.part_file import verify_part
from quorate.checkpoint.store import CheckpointFolder
from quorate.storage.objects import StoreError
from quorate.stores.copier import Copier
from quorate.stores.place import Contents, FolderPlace, Place
from quorate.stores.transfer import LEFT_BEHIND, Source
from stores.copied_run import infos, make_source, save


class MoodyPlace(FolderPlace):
    """A folder that is away while there is trouble, and can be waited in."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.trouble: StoreError | None = None
        self.tries = 0
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()

    def read(self, file: str) -> bytes | None:
        self._check()
        return super().read(file)

    def contents(self) -> Contents:
        self._check()
        return super().contents()

    def receive(self, name: str, manifest: Manifest, content: bytes, source: Place) -> int:
        self._check()
        if not self.gate.is_set():
            self.is_waiting.set()
            self.gate.wait()
        return super().receive(name, manifest, content, source)

    def _check(self) -> None:
        if self.trouble is not None:
            self.tries += 1
            raise self.trouble


class Listener:
    """Whom it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int | None, dict[str, Any]]] = []

    def __call__(self, kind: str, step: int | None, fields: dict[str, Any]) -> None:
        self.events.append((kind, step, fields))

    def told(self, kind: str) -> list[tuple[str, int | None, dict[str, Any]]]:
        return [event for event in self.events if event[0] == kind]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.stores.copier.pause_after", lambda failures, chance: 0.02)


@pytest.fixture
def place(tmp_path: Path) -> MoodyPlace:
    return MoodyPlace(tmp_path / "backup")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return make_source(tmp_path / "runs", 2, 4)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def copier(source: Source, place: MoodyPlace, listener: Listener) -> Iterator[Copier]:
    copier = Copier(source, place, listener)
    yield copier
    place.gate.set()
    place.trouble = None
    copier.close(10)


def present(place: MoodyPlace) -> set[str]:
    return set(FolderPlace(Path(str(place))).contents().whole)


def test_copies_what_is_there_and_what_comes(
    source: Source, place: MoodyPlace, copier: Copier, listener: Listener
) -> None:
    await_condition("both", lambda: len(present(place)) == 2, 60)
    save(source, 6)
    copier.poke()
    await_condition("the third", lambda: len(listener.told("copied_to")) == 3, 60)
    standing = copier.close(60)
    assert (standing.copied, standing.missing, standing.reason) == (3, (), "")
    assert [step for _, step, _ in listener.told("copied_to")] == [4, 2, 6], "the newest first"
    assert {fields["place"] for _, _, fields in listener.events} == {str(place)}
    assert not copier.is_busy


@pytest.mark.parametrize("after", [2, 0])
def test_what_is_set_aside_here_is_withdrawn_there(
    after: int, source: Source, place: MoodyPlace, copier: Copier, tmp_path: Path
) -> None:
    await_condition("both", lambda: len(present(place)) == 2, 60)
    folder = CheckpointFolder(source.run.checkpoints)
    folder.set_aside(after)
    copier.poke()
    left = {"step-00000002"} if after else set[str]()
    await_condition("the wrong ones are gone", lambda: present(place) == left, 60)
    save(source, 4)  # to the same bits, so that it was right
    copier.poke()
    await_condition("it is copied again", lambda: "step-00000004" in present(place), 60)


def test_trouble_is_told_once_and_so_is_its_end(source: Source, place: MoodyPlace, listener: Listener) -> None:
    place.trouble = StoreError("the store is away.")
    copier = Copier(source, place, listener)
    await_condition("many tries", lambda: place.tries > 10, 60)
    ((_, step, fields),) = listener.told("copy_failed")
    assert (step, fields["reason"], fields["missing"]) == (4, "the store is away.", 2)
    place.trouble = None
    await_condition("its end", lambda: listener.told("copy_recovered"), 60)
    assert present(place) == {"step-00000002", "step-00000004"}
    assert copier.close(60).missing == ()
    assert len(listener.told("copy_failed")) == 1


def test_another_trouble_is_told_again(source: Source, place: MoodyPlace, copier: Copier, listener: Listener) -> None:
    await_condition("a copy", lambda: len(present(place)) == 2, 60)
    place.trouble = StoreError("the store is away.")
    save(source, 6)
    copier.poke()
    await_condition("the first", lambda: listener.told("copy_failed"), 60)
    place.trouble = StoreError("access is refused.")
    await_condition("the second", lambda: len(listener.told("copy_failed")) == 2, 60)
    standing = copier.close(0.2)
    assert standing.missing == ("step-00000006",), "what was copied before is known to be there"
    assert standing.reason == "access is refused."


def test_the_end_waits_for_a_copy_in_the_making(source: Source, place: MoodyPlace, copier: Copier) -> None:
    await_condition("both", lambda: len(present(place)) == 2, 60)
    place.gate.clear()
    save(source, 6)
    copier.poke()
    threading.Timer(0.3, place.gate.set).start()
    assert copier.close(60).missing == ()
    assert "step-00000006" in present(place)


def test_the_end_does_not_wait_for_ever(source: Source, place: MoodyPlace, copier: Copier) -> None:
    await_condition("both", lambda: len(present(place)) == 2, 60)
    place.gate.clear()
    save(source, 6)
    began = time.monotonic()
    standing = copier.close(0.3)
    assert time.monotonic() - began >= 0.3
    assert standing.missing == ("step-00000006",)
    assert standing.reason == "it was not done in time."


def test_what_was_saved_while_a_place_says_nothing_is_known_to_be_missing(
    source: Source, place: MoodyPlace, copier: Copier
) -> None:
    await_condition("both", lambda: len(present(place)) == 2, 60)
    place.gate.clear()
    save(source, 6)
    copier.poke()
    assert place.is_waiting.wait(60)
    save(source, 8)
    assert copier.close(0.1).missing == ("step-00000008", "step-00000006")


def test_the_end_tries_again_what_may_pass(source: Source, place: MoodyPlace, listener: Listener) -> None:
    place.trouble = StoreError("the store is away.")
    copier = Copier(source, place, listener)
    await_condition("a failure", lambda: listener.told("copy_failed"), 60)

    def mend() -> None:
        place.trouble = None

    threading.Timer(0.3, mend).start()
    assert copier.close(60).missing == ()


def test_the_end_does_not_wait_for_what_a_person_must_mend(
    source: Source, place: MoodyPlace, listener: Listener
) -> None:
    place.trouble = StoreError("access is refused.", lasts=True)
    copier = Copier(source, place, listener)
    began = time.monotonic()
    standing = copier.close(60)
    assert time.monotonic() - began < 20
    assert standing.missing == ("step-00000004", "step-00000002")
    assert standing.reason == "access is refused."


def test_somebody_may_end_the_wait(source: Source, place: MoodyPlace, copier: Copier) -> None:
    place.gate.clear()
    save(source, 6)
    copier.poke()
    assert copier.close(60, give_up=lambda: True).missing


def test_a_damaged_checkpoint_is_told_and_the_others_are_copied(
    source: Source, place: MoodyPlace, listener: Listener
) -> None:
    part = part_of(infos(source)["step-00000004"].path)
    part.write_bytes(part.read_bytes()[:-1])
    copier = Copier(source, place, listener)
    await_condition("the other", lambda: present(place), 60)
    standing = copier.close(60)
    assert present(place) == {"step-00000002"}
    ((_, step, fields),) = listener.told("copy_failed")
    assert step == 4 and "truncated" in fields["reason"]
    assert standing.missing == standing.damaged == ("step-00000004",)


def test_a_damaged_checkpoint_that_is_saved_anew_is_copied(
    source: Source, place: MoodyPlace, listener: Listener
) -> None:
    damaged = infos(source)["step-00000004"].path
    part_of(damaged).unlink()
    copier = Copier(source, place, listener)
    await_condition("the failure", lambda: listener.told("copy_failed"), 60)
    CheckpointFolder(source.run.checkpoints).remove(damaged)
    save(source, 4, numbers=65)
    copier.poke()
    standing = copier.close(60)
    assert (standing.missing, standing.damaged) == ((), ())
    assert present(place) == {"step-00000002", "step-00000004"}


def test_a_copy_that_is_spoilt_at_the_place_is_made_again(
    source: Source, place: MoodyPlace, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt: list[Path] = []

    def verify(folder: Path, part: Part) -> None:
        if folder.name.startswith(".copying-") and not spoilt:
            spoilt.append(folder / part.file)
            spoilt[0].unlink()
        verify_part(folder, part)

    monkeypatch.setattr("quorate.stores.place.verify_part", verify)
    standing = Copier(source, place, listener).close(60)
    assert spoilt
    assert (standing.missing, standing.damaged) == ((), ())
    assert present(place) == {"step-00000002", "step-00000004"}
    ((_, _, fields),) = listener.told("copy_failed")
    assert fields["reason"].startswith(f"{place}: the copy of step-00000004")


def test_a_checkpoint_that_retention_removes_meanwhile_is_no_failure(
    source: Source, place: MoodyPlace, copier: Copier, listener: Listener
) -> None:
    await_condition("both", lambda: len(present(place)) == 2, 60)
    place.gate.clear()
    info = save(source, 6)
    copier.poke()
    assert place.is_waiting.wait(60)
    CheckpointFolder(source.run.checkpoints).remove(info.path)
    place.gate.set()
    assert copier.close(60).missing == ()
    assert not listener.told("copy_failed")


def test_a_run_without_checkpoints_leaves_no_trace(tmp_path: Path, place: MoodyPlace, listener: Listener) -> None:
    copier = Copier(make_source(tmp_path / "runs"), place, listener)
    assert copier.close(60).missing == ()
    assert not Path(str(place)).exists()


def test_retention_holds_there_too_and_spares_the_best(tmp_path: Path, place: MoodyPlace, listener: Listener) -> None:
    source = make_source(tmp_path / "runs", keep=2)
    save(source, 2, loss=0.1)
    for step in (4, 6, 8):
        save(source, step, loss=0.5)
    Copier(source, place, listener).close(60)
    folder = CheckpointFolder(source.run.checkpoints)
    for name, info in infos(source).items():
        if name != "step-00000008-evaluated":
            folder.remove(info.path)  # as if it had been fetched to another machine, with its newest checkpoint only
    Copier(source, place, listener).close(60)
    assert present(place) == {f"step-0000000{step}-evaluated" for step in (2, 6, 8)}


def test_what_a_dead_copier_left_is_swept_and_what_is_young_is_not(source: Source, place: MoodyPlace) -> None:
    old, young = (Path(str(place)) / f".copying-step-00000001-{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "part").write_text("half")
    long_ago = time.time() - LEFT_BEHIND - 10
    os.utime(old / "part", (long_ago, long_ago))
    os.utime(old, (long_ago, long_ago))
    Copier(source, place, Listener()).close(60)
    assert not old.exists() and young.exists()
