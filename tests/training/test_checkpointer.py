"""Checkpointers of several workers, together: what is committed, what is void, and who is told."""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bits.bit_tasks import FEATURES, Regression
from checkpoint.memory_store import MemoryStore
from made_events import fields_of
from quorate.checkpoint import store as store_module
from quorate.checkpoint.part_file import write_part
from quorate.checkpoint.store import CheckpointFolder, FolderAttempt
from quorate.checkpoint.tensor_file import Arena, TensorFile
from quorate.core.errors import CheckpointError, DivergedError, GenerationOver, JobError, LeaseExpired, PeerLost
from quorate.core.generation import Cursor
from quorate.observe.event import Event
from quorate.observe.events import CheckpointSaved
from quorate.replica.device import digests
from quorate.replica.state_layout import Replicated
from quorate.spec.job import CheckpointSpec
from quorate.training import checkpointer as checkpointer_module
from quorate.training.checkpointer import Checkpointer
from quorate.training.save import SaveContext
from quorate.training.save_decisions import Action
from training.saving_workers import Crew, Gate, Hand, assert_loads, at, await_true, best_at, opened_in_the_end, state_of

real_write = FolderAttempt.write


class OneTensor(Regression):
    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, 1, bias=False)


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    return Crew(tmp_path / "checkpoints", 3)


def spoil_writes(patch: pytest.MonkeyPatch, index: int, act: Callable[[], None], *, after: bool = False) -> None:
    """Do something before, or after, the part of this index is written."""

    def write(folder: Path, stem: str, *arguments: Any, **options: Any) -> Any:
        is_meant = stem.startswith(f"{index + 1}-of-")
        if is_meant and not after:
            act()
        part = write_part(folder, stem, *arguments, **options)
        if is_meant and after:
            act()
        return part

    patch.setattr(store_module, "write_part", write)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(*_: Any, **__: Any) -> Any:
    no_space()


def settle_and_tell(crew: Crew, settled: threading.Event) -> None:
    crew.settle(2)
    settled.set()


class TestASave:
    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_is_committed_with_a_part_of_every_worker_and_loads_bit_for_bit(self, tmp_path: Path, workers: int) -> None:
        crew = Crew(tmp_path / "checkpoints", workers)
        expected = state_of(crew.first, at(1))
        crew.save_in_background(at(1))
        info = crew.whole(1)
        assert len(info.manifest.parts) == workers
        assert_loads(crew.folder, info, expected)
        (event,) = crew.first.told("checkpoint")
        assert isinstance(event, CheckpointSaved)
        assert (event.step, event.parts, event.bytes) == (1, workers, info.bytes)
        assert event.path == str(info.path)
        assert [len(hand.events) for hand in crew.present] == [1] + [0] * (workers - 1)
        assert [hand.checkpointer.has_written(at(1)) for hand in crew.present] == [True] + [False] * (workers - 1)
        assert not any(crew.wants)

    def test_of_fewer_tensors_than_workers(self, tmp_path: Path) -> None:
        crew = Crew(tmp_path / "checkpoints", 3, OneTensor)
        expected = state_of(crew.first, at(1))
        crew.save_in_background(at(1))
        info = crew.whole(1)
        assert len(info.manifest.parts) == 1
        assert_loads(crew.folder, info, expected)

    def test_what_changes_later_does_not_reach_it(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = Gate()
        monkeypatch.setattr(FolderAttempt, "write", _held(gate))
        expected = state_of(crew.first, at(1))
        with opened_in_the_end(gate):
            crew.begin(at(1))
            crew.settle(2)
            crew.train(2)
            assert crew.steps() == []
        crew.await_done()
        assert_loads(crew.folder, crew.whole(1), expected)

    def test_the_state_may_not_change_before_the_copy_is_whole(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, stage = Gate(), Arena.stage

        def hold(arena: Arena, file: Any) -> Any:
            if arena is crew.present[1].context.arena:
                gate.pass_through()
            return stage(arena, file)

        monkeypatch.setattr(Arena, "stage", hold)
        settled = threading.Event()
        crew.begin(at(1))
        assert not crew.present[1].checkpointer.is_settled
        with opened_in_the_end(gate):
            assert gate.reached.wait(60)
            await_true("the others' copies", crew.present[0].saving.copied.is_set)
            threading.Thread(target=settle_and_tell, args=(crew, settled), daemon=True).start()
            assert not settled.wait(0.3)
        assert settled.wait(60)
        crew.await_done()
        crew.whole(1)

    @pytest.mark.parametrize("workers", [1, 3])
    def test_without_memory_for_a_copy_the_state_waits_until_all_is_written(
        self, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        crew = Crew(tmp_path / "checkpoints", workers)
        monkeypatch.setattr(Arena, "stage", lambda *_: None)
        gate = Gate()
        monkeypatch.setattr(FolderAttempt, "write", _held(gate))
        expected = state_of(crew.first, at(1))
        settled = threading.Event()
        crew.begin(at(1))
        with opened_in_the_end(gate):
            threading.Thread(target=settle_and_tell, args=(crew, settled), daemon=True).start()
            assert gate.reached.wait(60)
            assert not settled.wait(0.3)
        assert settled.wait(60), "it waits for what waits for it"
        crew.train(2)
        crew.await_done()
        assert_loads(crew.folder, crew.whole(1), expected)

    def test_of_replicas_that_differ_is_refused_with_the_tensor(self, crew: Crew) -> None:
        with torch.no_grad():
            crew.present[1].replica.parameters[2][1][0, 0] += 1
        name = crew.present[1].replica.parameters[2][0]
        crew.begin(at(1))
        crew.await_done()
        with pytest.raises(
            DivergedError, match=rf"after step 1: worker 1 and workers 0, 2 .* '{name}'; worker 1 is wrong"
        ):
            crew.settle(2)
        assert not crew.first.checkpointer.is_settled
        assert crew.names() == []

    def test_of_optimizers_that_differ_is_refused(self, crew: Crew) -> None:
        optimizer = next(iter(crew.present[2].replica.optimizers.by_name.values()))
        next(iter(optimizer.state.values()))["exp_avg"][0, 0] += 1
        with pytest.raises(DivergedError, match=r"worker 2 and workers 0, 1 .*'optimizer .* exp_avg'"):
            crew.first_to_fail(lambda hand: hand.checkpointer.save(at(1), hand.seat))
        crew.await_done()
        assert crew.names() == []


def _held(gate: Gate) -> Callable[..., Any]:
    def write(attempt: FolderAttempt, *arguments: Any, **options: Any) -> Any:
        gate.pass_through()
        return real_write(attempt, *arguments, **options)

    return write


class TestTheDiskIsFull:
    """Training goes on, whoever's disk it is; it is told; nothing is left; and the next save is whole."""

    def _fails_and_is_followed(self, crew: Crew, patch: Callable[[pytest.MonkeyPatch], object]) -> list[str]:
        with pytest.MonkeyPatch.context() as spoilt:
            patch(spoilt)
            crew.save_in_background(at(1))
        assert crew.names() == []
        reasons = [fields_of(event)["reason"] for hand in crew.present for event in hand.told("checkpoint_failed")]
        assert not any(crew.wants), "the next save tries again, not the next step"
        crew.train(2)
        expected = state_of(crew.first, at(2))
        crew.save_in_background(at(2))
        assert_loads(crew.folder, crew.whole(2), expected)
        return reasons

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_for_one_writer(self, crew: Crew, index: int) -> None:
        (reason,) = self._fails_and_is_followed(crew, lambda patch: spoil_writes(patch, index, no_space))
        assert reason.startswith("cannot save checkpoint step-00000001 in ")
        assert "No space left on device; it needs" in reason
        assert "are free. Free some space" in reason

    def test_when_the_attempt_is_made(self, crew: Crew) -> None:
        (reason,) = self._fails_and_is_followed(crew, lambda patch: patch.setattr(Path, "mkdir", full_disk))
        assert "No space left on device" in reason

    def test_when_the_manifest_is_written(self, crew: Crew) -> None:
        where = "quorate.checkpoint.store.write_new_file"
        (reason,) = self._fails_and_is_followed(crew, lambda patch: patch.setattr(where, full_disk))
        assert "No space left on device" in reason

    def test_when_it_gets_its_name(self, crew: Crew) -> None:
        where = "quorate.checkpoint.store.move_into_place"
        (reason,) = self._fails_and_is_followed(crew, lambda patch: patch.setattr(where, full_disk))
        assert "No space left on device" in reason

    def test_something_unforeseen_is_no_more_harm(self, crew: Crew) -> None:
        def break_down() -> None:
            raise RuntimeError("the writer has had enough")

        (reason,) = self._fails_and_is_followed(crew, lambda patch: spoil_writes(patch, 1, break_down))
        assert "the writer has had enough" in reason

    def test_that_an_attempt_cannot_be_made_is_not_told_again_at_every_step(self, crew: Crew) -> None:
        for hand in crew.present:
            hand.checkpointer._owes = True
        with pytest.MonkeyPatch.context() as spoilt:
            spoilt.setattr(Path, "mkdir", full_disk)
            crew.begin(at(1))
        assert not any(crew.wants)
        assert len(crew.first.told("checkpoint_failed")) == 1


class TestSomebodyIsGone:
    def _begun(self, crew: Crew, monkeypatch: pytest.MonkeyPatch, slow: int) -> Gate:
        """A save that all agree on, and of which one part is not written: that writer is held."""
        gate = Gate()
        spoil_writes(monkeypatch, slow, gate.pass_through)
        crew.begin(at(1))
        crew.settle(2)
        assert gate.reached.wait(60)
        for hand in crew.present[1:]:
            if hand is not crew.present[slow]:
                assert hand.saving.done.wait(60)
        return gate

    def _the_next_is_committed(self, crew: Crew, gone: Gate) -> None:
        """What is owed is saved; then the one that was gone wakes up, and can do no harm."""
        crew.train(2)
        expected = state_of(crew.first, at(2))
        crew.save_in_background(at(2))
        assert_loads(crew.folder, crew.whole(2), expected)
        assert not any(crew.wants)

    def test_whose_part_is_not_there(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        gone = crew.present[2]
        gate = self._begun(crew, monkeypatch, 2)
        with opened_in_the_end(gate):
            crew.leave()
            crew.sit(crew.hands[:2])
            crew.enter(1)
            crew.await_done()
            assert crew.names() == []
            assert any(crew.wants)
            assert [event.kind for hand in crew.present for event in hand.events] == []
            monkeypatch.undo()
            self._the_next_is_committed(crew, gate)
        assert gone.saving.done.wait(60)
        assert crew.steps() == [2]
        crew.whole(2)

    @pytest.mark.parametrize("gone", [0, 2], ids=["who commits", "who writes a part"])
    def test_while_the_best_so_far_is_written_is_told_once_training_has_gone_on(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch, gone: int
    ) -> None:
        gate = Gate()
        spoil_writes(monkeypatch, gone, gate.pass_through)
        crew.hands[gone].check_commit = _gone
        crew.begin(best_at(1))
        crew.settle(2)
        with opened_in_the_end(gate):
            crew.sit([hand for hand in crew.hands if hand.number != gone])
            crew.enter(1)
            assert not any(hand.told("checkpoint_failed") for hand in crew.present), "this state can be saved again"
            crew.enter(2)
            crew.await_done()
            told = [event for hand in crew.present for event in hand.told("checkpoint_failed")]
            assert {(event.step, fields_of(event)["reason"]) for event in told} == {
                (1, "a worker was lost while it was written, so the best evaluation so far is not saved")
            }
        assert crew.hands[gone].saving.done.wait(60)

    def test_whose_part_is_there_already(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = state_of(crew.first, at(1))
        gate = self._begun(crew, monkeypatch, 0)
        with opened_in_the_end(gate):
            crew.sit(crew.hands[:2])
            crew.enter(1)
            assert not any(crew.wants)
        crew.await_done()
        assert_loads(crew.folder, crew.whole(1), expected)

    @pytest.mark.parametrize("slow", [0, 1], ids=["that has not written its part", "while a part is missing"])
    def test_who_commits(self, crew: Crew, monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
        gone = crew.first
        gone.check_commit = _gone
        gate = self._begun(crew, monkeypatch, slow)
        with opened_in_the_end(gate):
            crew.sit(crew.hands[1:])
            crew.enter(1)
            assert all(crew.wants)
            gate.open()
            crew.await_done()
            monkeypatch.undo()
            # The same state again: it is not taken for saved by those who have only written a part of it.
            expected = state_of(crew.first, at(1))
            crew.save_in_background(at(1))
            assert_loads(crew.folder, crew.whole(1), expected)
            assert not any(crew.wants)
        assert gone.saving.done.wait(60)
        assert crew.steps() == [1]

    def test_who_was_about_to_commit_the_last_one(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        gone = crew.first
        gone.check_commit = _gone
        self._begun(crew, monkeypatch, 0).open()
        crew.present[1].saving.done.wait(60)
        crew.sit(crew.hands[1:])
        crew.enter(1)
        crew.save(at(1))
        crew.whole(1)
        assert gone.saving.done.wait(60)

    def test_who_has_committed_owes_nothing(self, crew: Crew) -> None:
        crew.save_in_background(at(1))
        crew.sit(crew.hands[1:])
        crew.enter(1)
        assert not any(crew.wants)
        crew.save(at(1))
        assert crew.steps() == [1]

    def test_where_the_checkpoints_cannot_be_listed_it_counts_as_not_saved(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        crew.save_in_background(at(1))
        crew.sit(crew.hands[1:])

        def refuse(_: CheckpointFolder) -> Any:
            raise CheckpointError("cannot be read")

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointFolder, "list", refuse)
            crew.enter(1)
        assert all(crew.wants)

    def test_and_a_newcomer_takes_part_in_the_next(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = self._begun(crew, monkeypatch, 1)
        with opened_in_the_end(gate):
            crew.sit([crew.hands[0], crew.newcomer(), crew.hands[2]])
            crew.enter(1)
            crew.await_done()
            assert any(crew.wants)
            monkeypatch.undo()
            self._the_next_is_committed(crew, gate)
        assert len(crew.whole(2).manifest.parts) == 3

    @pytest.mark.parametrize("index", [0, 2], ids=["who commits", "who writes a part"])
    def test_only_as_it_was_begun_by_the_others(self, crew: Crew, index: int) -> None:
        """All are there again; but one never learned what they had answered, and so never began."""
        late = crew.present[index]
        gather = late.seat.gather

        def lose_the_answers(step: int, payload: bytes) -> tuple[bytes, ...]:
            gather(step, payload)
            raise PeerLost("somebody", "is gone")

        late.seat.gather = lose_the_answers  # type: ignore[method-assign]
        with pytest.raises(PeerLost):
            crew.begin(at(1))
        crew.leave()
        crew.sit(crew.hands)
        crew.enter(1)
        crew.await_done()
        assert crew.steps() == []
        assert any(crew.wants)
        crew.save_in_background(at(1))
        crew.whole(1)

    def test_who_comes_back_as_another_is_not_taken_for_the_one_that_was_gone(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = self._begun(crew, monkeypatch, 1)
        with opened_in_the_end(gate):
            again = Hand(1, crew.folder.folder, crew.task)
            crew.sit([crew.hands[0], again, crew.hands[2]])
            crew.enter(1)
            crew.await_done()
            assert crew.names() == []


def _gone() -> None:
    raise GenerationOver("the generation is over")


def test_one_that_another_gives_up_while_it_is_committed_is_void_and_no_failure(crew: Crew) -> None:
    """Whoever gives it up tells why."""
    calls: list[None] = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 2:  # all is written, and the rename is next
            crew.first.saving.plan.attempt.give_up()

    crew.first.check_commit = check
    crew.save_in_background(at(1))
    assert len(calls) == 2
    assert crew.first.events == []
    assert crew.names() == []
    assert "abandoned by another writer" in (crew.first.saving.failure or "")
    crew.save_in_background(at(1))
    crew.whole(1)


class TestTheGenerationEnds:
    def test_when_it_is_copied_it_is_completed_all_the_same(self, crew: Crew) -> None:
        expected = state_of(crew.first, at(1))
        crew.begin(at(1))
        crew.settle(1)
        crew.leave()
        assert all(hand.checkpointer.is_settled for hand in crew.present)
        crew.train(2)
        crew.await_done()
        assert_loads(crew.folder, crew.whole(1), expected)
        crew.sit(crew.hands)
        crew.enter(1)
        assert not any(crew.wants)

    @pytest.mark.parametrize("has_memory", [True, False], ids=["in memory", "from the state itself"])
    def test_before_it_is_copied_it_is_void_whatever_is_written_then(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch, has_memory: bool
    ) -> None:
        """The state may be another by the time the copy goes on."""
        monkeypatch.setattr(checkpointer_module, "LEAVING", 0.1)
        gate, stage = Gate(), Arena.stage

        def hold(arena: Arena, file: Any) -> Any:
            if has_memory:
                gate.pass_through()
            return stage(arena, file) if has_memory else None

        def held_chunks(file: TensorFile) -> Any:
            content = b"".join(chunks(file))
            yield content[:-1]
            gate.pass_through()
            yield content[-1:]

        chunks = TensorFile.chunks
        monkeypatch.setattr(Arena, "stage", hold)
        if not has_memory:
            monkeypatch.setattr(TensorFile, "chunks", held_chunks)
        with opened_in_the_end(gate):
            crew.begin(at(1))
            assert gate.reached.wait(60)
            crew.leave()
            crew.train(2)
        crew.await_done()
        assert crew.names() == []
        assert all(crew.wants)
        monkeypatch.undo()
        crew.sit(crew.hands)
        crew.enter(2)
        crew.save_in_background(at(2))
        crew.whole(2)

    @pytest.mark.parametrize(("back", "is_kept"), [(0, False), (1, True)])
    def test_where_all_go_back_what_is_later_is_given_up(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch, back: int, is_kept: bool
    ) -> None:
        gate, stage = Gate(), Arena.stage

        def hold(arena: Arena, file: Any) -> Any:
            gate.pass_through()
            return stage(arena, file)

        monkeypatch.setattr(Arena, "stage", hold)
        with opened_in_the_end(gate):
            crew.begin(at(1))
            assert gate.reached.wait(60)
            for hand in crew.present:
                hand.checkpointer.go_back(at(back).cursor)
        crew.await_done()
        assert bool(crew.names()) is is_kept

    def test_while_somebody_waits_for_the_copy(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, stage = Gate(), Arena.stage

        def hold(arena: Arena, file: Any) -> Any:
            gate.pass_through()
            return stage(arena, file)

        monkeypatch.setattr(Arena, "stage", hold)
        with opened_in_the_end(gate):
            crew.begin(at(1))
            for hand in crew.present:
                hand.check_lease = _gone
            with pytest.raises(GenerationOver):
                crew.settle(2)
            crew.leave()
        crew.await_done()
        assert crew.names() == []
        assert all(crew.wants)


class TestStillBusy:
    def test_the_next_is_skipped_and_that_is_told_once(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = Gate()
        monkeypatch.setattr(FolderAttempt, "write", _held(gate))
        with opened_in_the_end(gate):
            crew.begin(at(1))
            crew.settle(2)
            crew.train(2)
            crew.begin(at(2))
            assert not any(crew.wants)
            crew.settle(3)
        crew.await_done()
        assert [event.step for event in crew.first.told("checkpoint_skipped")] == [2]
        assert [hand.told("checkpoint_skipped") for hand in crew.present[1:]] == [[], []]
        crew.whole(1)
        assert crew.steps() == [1]

    def test_also_where_only_another_worker_is_busy(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        crew.save_in_background(at(1))
        crew.present[1].saving.done.clear()
        crew.begin(at(2))
        crew.present[1].saving.done.set()
        assert [event.step for event in crew.first.told("checkpoint_skipped")] == [2]
        crew.whole(1)

    def test_the_next_waits_where_it_shall(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        crew = Crew(tmp_path / "checkpoints", 3, when_busy="wait")
        gate = Gate()
        monkeypatch.setattr(FolderAttempt, "write", _held(gate))
        with opened_in_the_end(gate):
            crew.begin(at(1))
            crew.settle(2)
            crew.train(2)
            opener = threading.Timer(0.2, gate.open)
            opener.start()
            crew.begin(at(2))
            crew.settle(3)
        crew.await_done()
        opener.join()
        crew.whole(1)
        crew.whole(2)
        assert crew.first.told("checkpoint_skipped") == []

    def test_the_best_so_far_waits_also_where_others_are_skipped(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate()
        monkeypatch.setattr(FolderAttempt, "write", _held(gate))
        begun = threading.Event()
        with opened_in_the_end(gate), ThreadPoolExecutor(1) as thread:
            crew.begin(at(1))
            crew.settle(2)
            crew.train(2)
            expected = state_of(crew.first, best_at(2))
            next_one = thread.submit(crew.begin, best_at(2))
            next_one.add_done_callback(lambda _: begun.set())
            assert not begun.wait(0.3), "it was skipped, or is begun beside the other"
            gate.open()
            next_one.result(60)
            crew.settle(3)
        crew.await_done()
        assert crew.steps() == [1, 2]
        info = next(info for info in crew.folder.list() if info.cursor.step == 2)
        assert_loads(crew.folder, info, expected)
        assert info.manifest.best == {"value": 0.5, "step": 2}
        assert crew.first.told("checkpoint_skipped") == []

    def test_the_same_again_is_not_saved_twice(self, crew: Crew) -> None:
        crew.save_in_background(at(1))
        crew.begin(at(1))
        crew.save(at(1))
        assert len(crew.first.told("checkpoint")) == 1


class TestByTime:
    def test_when_the_minutes_are_over(self, tmp_path: Path) -> None:
        crew = Crew(tmp_path / "checkpoints", 2, every=None, minutes=2.0)
        now = crew.first.clock()
        self._at(crew, now + 100)
        assert self._wants(crew) == [False, False]
        self._at(crew, now + 130)
        assert self._wants(crew) == [True, True]
        assert crew.wants == [False, False], "it is asked for by the one that hosts lane 0"
        crew.save_in_background(at(1))
        assert self._wants(crew) == [False, False]
        self._at(crew, now + 249)
        assert self._wants(crew) == [False, False]
        self._at(crew, now + 251)
        assert self._wants(crew) == [True, True]

    def test_one_that_cannot_begin_is_not_asked_for_at_every_step(self, tmp_path: Path) -> None:
        crew = Crew(tmp_path / "checkpoints", 2, every=None, minutes=2.0)
        self._at(crew, crew.first.clock() + 130)
        with pytest.MonkeyPatch.context() as spoilt:
            spoilt.setattr(Path, "mkdir", full_disk)
            crew.begin(at(1))
        assert len(crew.first.told("checkpoint_failed")) == 1
        assert self._wants(crew) == [False, False]

    def _at(self, crew: Crew, now: float) -> None:
        for hand in crew.hands:
            hand.clock = lambda: now

    def _wants(self, crew: Crew) -> list[bool]:
        return [hand.checkpointer.is_wanted(by_time=True) for hand in crew.present]


class TestThereIsNoSpaceUntilOldOnesAreGone:
    """Where `checkpoint.keep` is lower than what lies there, as after a resume with another."""

    @pytest.fixture
    def crew(self, tmp_path: Path) -> Crew:
        crew = Crew(tmp_path / "checkpoints", 2, keep=5)
        for step in (1, 2, 3):
            crew.train(step)
            crew.save_in_background(best_at(2) if step == 2 else replace(at(step), best=best_at(2).best))
        crew.do(lambda hand: hand.keep(1))
        return crew

    def _spoil(self, patch: pytest.MonkeyPatch, crew: Crew, index: int) -> None:
        spoil_writes(patch, index, lambda: no_space() if 1 in crew.steps() else None)

    @pytest.mark.parametrize("index", [0, 1], ids=["for who commits", "for another"])
    def test_the_next_save_makes_room_but_keeps_the_newest_whole_and_the_best(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch, index: int
    ) -> None:
        self._spoil(monkeypatch, crew, index)
        crew.train(4)
        progress = replace(at(4), best=best_at(2).best)
        crew.save_in_background(progress)
        assert crew.steps() == [1, 2, 3], "nothing goes before it is known that there is no space"
        held = Gate()
        crew.first.check_commit = lambda: None if crew.steps() != [2, 3] else held.reached.set()
        crew.save(progress)
        assert held.reached.is_set(), "first what is too much goes, and then the new one is committed"
        assert crew.steps() == [2, 4]

    def test_the_best_of_a_longer_job_is_kept_where_the_job_ends_with_another(self, crew: Crew) -> None:
        crew.first.checkpointer._known_whole = Cursor(3)
        crew.first.checkpointer._free_space(replace(at(4), best=best_at(3).best, lasting_best=best_at(2).best))
        assert crew.steps() == [2, 3]

    def test_a_lease_that_is_lost_meanwhile_fails_no_save(self, crew: Crew) -> None:
        crew.first.check_commit = _gone
        crew.first.checkpointer._known_whole = Cursor(3)
        crew.first.checkpointer._free_space(at(4))
        assert crew.steps() == [1, 2, 3]

    def test_whoever_commits_next_knows_what_is_whole(self, crew: Crew) -> None:
        crew.begin(replace(at(3), best=best_at(2).best))
        assert [hand.checkpointer._known_whole for hand in crew.present] == [Cursor(3)] * 2

    def test_nothing_goes_where_none_is_known_to_be_whole(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpointer_module, "PAUSES", (0.01,))
        self._spoil(monkeypatch, crew, 0)
        for hand in crew.present:
            hand.checkpointer._known_whole = hand.checkpointer._latest = None
        crew.train(4)
        with pytest.raises(CheckpointError, match="No space left"):
            crew.save(at(4))
        assert crew.steps() == [1, 2, 3]


class TestASaveThatMustNotFail:
    @pytest.fixture(autouse=True)
    def short_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpointer_module, "PAUSES", (0.01, 0.01, 0.01))

    @pytest.mark.parametrize("index", [0, 2])
    def test_is_tried_again_until_there_is_space(self, crew: Crew, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
        troubles = iter([no_space, no_space])
        spoil_writes(monkeypatch, index, lambda: next(troubles, lambda: None)())
        expected = state_of(crew.first, at(1))
        crew.save(at(1))
        assert_loads(crew.folder, crew.whole(1), expected)
        assert len([e for hand in crew.present for e in hand.told("checkpoint_failed")]) == 2
        retried = [fields_of(event)["message"] for hand in crew.present for event in hand.told("log")]
        assert len(retried) == 2 and all("of step 1 is tried again in 0 s: cannot save" in each for each in retried)
        assert len(crew.first.told("checkpoint")) == 1

    @pytest.mark.parametrize("index", [0, 2])
    def test_fails_in_the_end_with_the_reason_on_every_worker(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch, index: int
    ) -> None:
        spoil_writes(monkeypatch, index, no_space)

        def save(hand: Hand) -> str:
            with pytest.raises(CheckpointError) as told:
                hand.checkpointer.save(at(1), hand.seat)
            return str(told.value)

        (reason,) = set(crew.do(save))
        assert "cannot save checkpoint step-00000001" in reason
        assert "No space left on device" in reason
        assert crew.names() == []

    def test_fails_with_the_reason_where_no_attempt_can_be_made(
        self, crew: Crew, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Path, "mkdir", full_disk)
        with pytest.raises(CheckpointError, match="No space left on device"):
            crew.save(at(1))
        assert len(crew.first.told("checkpoint_failed")) == 4

    def test_ends_with_its_generation(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpointer_module, "PAUSES", (60.0,))
        spoil_writes(monkeypatch, 1, no_space)
        failed = threading.Event()
        for hand in crew.present:
            hand.check_lease = lambda: _gone() if failed.is_set() else None
        monkeypatch.setattr(checkpointer_module.log, "warning", lambda *_: failed.set())
        with pytest.raises(GenerationOver):
            crew.save(at(1))
        crew.await_done()
        assert crew.names() == []

    def test_comes_further_while_it_waits_for_the_next_try(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        """Or all would count as hung where `step_timeout` is shorter than the wait."""
        monkeypatch.setattr(checkpointer_module, "PAUSES", (60.0,))
        spoil_writes(monkeypatch, 1, no_space)
        activity, seen = crew.first.checkpointer.activity, set[int]()

        def look() -> None:
            if activity.waits_for == "the next try":
                seen.add(activity.moves)
            # For all, also when the first has left by now: whoever is not told would wait out its minute.
            if len(seen) >= 3:
                _gone()

        for hand in crew.present:
            hand.check_lease = look
        with pytest.raises(GenerationOver):
            crew.save(at(1))
        assert len(seen) >= 3

    def test_waits_for_the_one_that_is_under_way(self, crew: Crew) -> None:
        crew.begin(at(1))
        crew.settle(2)
        crew.train(2)
        crew.save(at(2))
        crew.whole(2)
        assert crew.steps() == [1, 2]


class TestTheLease:
    def test_between_two_generations_a_commit_waits(self, crew: Crew) -> None:
        over = threading.Event()
        asked = threading.Event()

        def check() -> None:
            asked.set()
            if not over.is_set():
                _gone()

        crew.first.check_commit = check
        crew.begin(at(1))
        crew.settle(2)
        assert asked.wait(60)
        assert crew.steps() == []
        assert not crew.first.saving.done.is_set()
        crew.sit(crew.hands)
        crew.enter(1)
        assert not any(crew.wants)
        over.set()
        crew.await_done()
        crew.whole(1)

    def test_what_is_complete_needs_nobody_any_more(self, crew: Crew) -> None:
        """All parts are there and compared; while the commit waits for the next generation, a writer dies."""
        between = threading.Event()

        def nobody_may() -> None:
            if not between.is_set():
                raise GenerationOver("between two generations")

        crew.first.check_commit = nobody_may
        crew.begin(at(1))
        crew.settle(2)
        await_true("all is there", lambda: crew.first.saving.is_complete)
        crew.leave()
        crew.sit(crew.hands[:2])
        crew.enter(1)
        between.set()
        crew.await_done()
        crew.whole(1)
        assert not any(crew.wants)

    def test_whose_job_ends_before_the_steps_are_told_commits_nothing(self, crew: Crew) -> None:
        """Whoever resumed from it would not pass through those steps, and nobody could tell what they had used."""

        def too_late() -> None:
            raise JobError("the job has ended: its launcher is gone")

        crew.first.tell_all = too_late
        crew.begin(at(1))
        crew.settle(2)
        crew.await_done()
        assert crew.names() == []
        assert "could not be recorded any more" in (crew.first.saving.failure or "")

    @pytest.mark.parametrize("comes_back", [True, False])
    def test_that_ends_before_the_rename_commits_nothing(self, crew: Crew, comes_back: bool) -> None:
        calls: list[bool] = []
        is_back = threading.Event()

        def check() -> None:
            calls.append(bool(list(crew.folder.folder.glob("*/manifest.json"))))
            if len(calls) >= 3 and not is_back.is_set():  # from the third on, when the manifest is written
                raise LeaseExpired("the coordinator has sent no heartbeat for too long")

        crew.first.check_commit = check
        expected = state_of(crew.first, at(1))
        crew.begin(at(1))
        crew.settle(2)
        await_true("several looks at the lease", lambda: len(calls) >= 5)
        assert calls[:3] == [False, False, True]
        assert crew.steps() == []
        if comes_back:
            is_back.set()
            crew.await_done()
            assert_loads(crew.folder, crew.whole(1), expected)
            assert [event.kind for event in crew.first.events] == ["checkpoint"]
        else:
            crew.first.checkpointer.close(0.01)
            crew.await_done()
            assert crew.names() == []

    def test_that_ends_after_the_rename_leaves_a_checkpoint_that_is_told(self, tmp_path: Path) -> None:
        crew = Crew(tmp_path / "checkpoints", 2, keep=1)
        crew.save_in_background(at(1))
        calls: list[int] = []

        def check() -> None:
            calls.append(1)
            if crew.folder.folder.joinpath("step-00000002").exists():
                raise LeaseExpired("the coordinator has sent no heartbeat for too long")

        crew.first.check_commit = check
        crew.train(2)
        crew.save_in_background(at(2))
        assert crew.steps() == [1, 2], "whoever has no lease removes nothing"
        assert [event.step for event in crew.first.told("checkpoint")] == [1, 2]
        assert crew.first.told("checkpoint_failed") == []


class TestTheWorkerLeaves:
    def test_what_others_wait_for_is_completed_first(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = Gate()
        spoil_writes(monkeypatch, 1, gate.pass_through)
        crew.begin(at(1))
        crew.settle(2)
        opener = threading.Timer(0.2, gate.open)
        opener.start()
        crew.present[1].checkpointer.close(20)
        assert crew.present[1].saving.done.is_set()
        crew.await_done()
        opener.join()
        crew.whole(1)

    def test_what_takes_too_long_is_given_up(self, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = Gate()
        spoil_writes(monkeypatch, 1, gate.pass_through)
        with opened_in_the_end(gate):
            crew.begin(at(1))
            crew.settle(2)
            crew.present[1].checkpointer.close(0.01)
        crew.await_done()
        assert crew.names() == []


def test_whoever_waits_for_a_save_says_what_for_and_that_it_comes_further(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    spoil_writes(monkeypatch, 1, gate.pass_through)  # by a disk that stands still
    committer, writer = (hand.checkpointer.activity for hand in crew.present[:2])
    saving = threading.Thread(target=crew.save, args=(at(1),))
    with opened_in_the_end(gate):
        saving.start()
        await_true("the one whose disk stands still", lambda: writer.waits_for == "the disk")
        await_true("the one that commits", lambda: committer.waits_for == "the other workers")
        before = writer.moves
        # Every piece that is written shows that it is not stuck.
        crew.present[1].saving.pieces += 1
        await_true("that it moves", lambda: writer.moves > before)
    saving.join(60)
    assert (committer.waits_for, writer.waits_for) == ("", "")
    assert crew.whole(1)


def test_a_simulator_can_drive_it_without_threads_disk_or_clock() -> None:
    """One action at a time, in simulated seconds, on a disk in memory."""
    hand, store = Hand(0, Path("nowhere"), OneTensor), MemoryStore()
    work: list[Callable[[], None]] = []
    leave: list[BaseException | None] = [None, GenerationOver("between two generations"), None, None, None]

    def check_commit() -> None:
        if (error := leave.pop(0)) is not None:
            raise error

    events: list[Event] = []
    seconds = iter(range(1000))
    context = SaveContext(
        store,
        None,
        events.append,
        check_commit,
        clock=lambda: float(next(seconds)),
        start=work.append,
        wait=lambda event, _: event.is_set(),
    )
    checkpointer = Checkpointer(context, Replicated(hand.replica), CheckpointSpec(), {}, {}, check_lease=lambda: None)
    checkpointer.begin(at(1), hand.seat)
    (_,) = work
    save = checkpointer._latest
    assert save is not None
    assert not checkpointer.is_settled
    actions = []
    while not save.done.is_set():
        assert store.list() == ()
        actions.append(save.advance())
        if actions[-1] is Action.COPY:
            assert checkpointer.is_settled
        if actions[-1] is Action.COMMIT:
            assert save.advance() is Action.FINISH
    assert actions == [Action.COPY, Action.WRITE, Action.WAIT, Action.COMMIT]
    assert [info.cursor.step for info in store.list()] == [1]
    assert [event.kind for event in events] == ["checkpoint"]
    loaded = store.load(store.list()[0]).state["replica"]["tensors"]
    assert digests(loaded.items()) == digests(hand.replica.tensors())
