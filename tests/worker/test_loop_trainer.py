"""How the loop is given a generation, and what a worker tells of it: with a loop that notes what it is asked."""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quorate.core.errors import GenerationOver, PeerLost
from quorate.core.generation import Cursor, Generation, GenerationId, Member
from quorate.core.timing import Timing
from quorate.data.sampler import Source
from quorate.observe.event import DeviceMemoryUse
from quorate.observe.events import LinksMeasured
from quorate.spec.tracking import TrackSpec
from quorate.task.progress import Best, Progress
from quorate.training.audit import AuditRecord
from quorate.training.strategy import Save, StepRequest
from quorate.worker import session
from quorate.worker.assignment import Assignment
from quorate.worker.membership import Membership
from quorate.worker.session import LoopTrainer, StrategyLinks


def generation(own: int = 4, others: int = 4) -> Generation:
    members = (Member(0, "a:1", range(2), "", Cursor(own)), Member(1, "a:2", range(2, 4), "", Cursor(others)))
    return Generation(GenerationId(1, 3), members)


class Noted:
    """What is around a trainer: everything that it does is noted, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slot: int = 0) -> None:
        self.notes: list[str] = []
        self.view = SimpleNamespace(
            is_asked=True,
            break_requested=False,
            save_requested=False,
            save_asked=False,
            stop_requested=None,
            save_begun=lambda: None,
        )
        self.is_over = False
        self.is_called: Callable[[], bool] | None = None
        self.connected: list[Any] = []
        self.ending: str | Exception | None = None
        self.last_step_at = 15.0
        self.reached = Progress(Cursor(9), samples=900)
        self.validation: dict[Source, list[int]] = {}
        monkeypatch.setattr(session, "Assembly", self._assembly)
        membership = SimpleNamespace(
            view=self.view,
            check_lease=self._check_lease,
            lease_remaining=lambda: 4.0,
            publish=lambda event: self.notes.append(f"{event.kind} of {event.worker}"),
            requested=StepRequest,
        )
        parts = SimpleNamespace(
            spec=SimpleNamespace(track=None, on_out_of_memory="fail"),
            strategy=SimpleNamespace(connect=self._connect),
            layout=SimpleNamespace(weights_digest=lambda gather: "d"),
            replica=SimpleNamespace(device=SimpleNamespace(is_host=True), loss_scale=None),
            samples=SimpleNamespace(datasets=self.validation),
            audits=AuditRecord(),
        )
        self.trainer = LoopTrainer(
            parts=cast(Any, parts),
            progress=Progress(Cursor(4), samples=400),
            listeners=cast(Any, None),
            membership=cast(Any, membership),
            backlog=cast(Any, SimpleNamespace(publish=self._publish, keep=lambda event: None)),
            hook=cast(Any, self),
            activity=cast(Any, SimpleNamespace(begin_step=lambda step: self.notes.append(f"begins {step}"))),
            write_status=lambda step, phase, lane: self.notes.append(f"{phase} at {step}"),
            assignment=Assignment(
                run="run", slot=slot, workers=1, task="", job={}, job_source="", coordinator="", token="t"
            ),
            timing=Timing(5.0),
            checkpointer=cast(Any, None),
        )

    def on_generation(self, members: Collection[int], is_ending: Callable[[], bool]) -> None:
        self.notes.append(f"generation of {sorted(members)}")
        self.is_called = is_ending

    def on_lane(self, gradients: Any) -> None:
        """Leave them alone."""

    def _check_lease(self) -> None:
        if self.is_over:
            raise GenerationOver("over")

    def _connect(self, endpoint: Any) -> Any:
        self.connected.append(endpoint)
        links = SimpleNamespace(close=lambda: self.notes.append("aborted"), gather=lambda *_: [])
        return SimpleNamespace(
            links=links,
            close=lambda: self.notes.append("closed"),
            measure=lambda: LinksMeasured(worker=0),
            placed=lambda: None,
            align=lambda *_: self._align(endpoint.generation),
        )

    def _align(self, generation: Generation) -> tuple[Progress, int]:
        self.notes.append("copied")
        return Progress(generation.cursor, samples=700), 123

    def _publish(self, event: Any) -> None:
        self.notes.append(f"{event.kind} at {event.step} of {event.generation}: {event.bytes}")

    def _assembly(self, *given: Any) -> Any:
        def run() -> str | None:
            self.notes.append(f"runs from {given[4].cursor.step}")
            if isinstance(self.ending, Exception):
                raise self.ending
            return self.ending

        loop = SimpleNamespace(
            run=run,
            close=lambda: self.notes.append("loop closed"),
            progress=self.reached,
            is_saved=True,
            last_step_at=self.last_step_at,
        )
        return SimpleNamespace(loop=lambda: loop)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch)


def test_a_generation_is_connected_trained_and_closed_from_within(noted: Noted) -> None:
    trainer = noted.trainer
    links = trainer.connect(generation())
    trainer.align(generation(), links)
    noted.ending = "complete"
    assert trainer.train(generation(), links) == "complete"
    links.close()
    assert noted.notes == [
        *("generation of [0, 1]", "join at 4", "begins 4", "runs from 4"),
        *("loop closed", "closed"),
    ]
    assert (trainer.cursor, trainer.is_saved) == (Cursor(9), True)


@pytest.mark.parametrize(
    ("track", "told"),
    [({"prometheus": 0}, ["links of 0"]), ({"tensorboard": True}, ["links of 0"]), ({"every": 5}, []), (None, [])],
)
def test_links_are_measured_before_the_first_step_if_the_job_is_tracked(
    noted: Noted, track: dict[str, Any] | None, told: list[str]
) -> None:
    noted.trainer.parts.spec.track = None if track is None else TrackSpec(**track)
    links = noted.trainer.connect(generation())
    noted.trainer.train(generation(), links)
    assert noted.notes[2:] == ["begins 4", *told, "runs from 4"]


def test_in_the_next_generation_nothing_is_saved_yet_and_nobody_need_disturb_it(noted: Noted) -> None:
    noted.trainer.is_saved = True
    noted.trainer.hook = None
    noted.trainer.connect(generation())
    assert not noted.trainer.is_saved
    assert noted.notes == ["join at 4"]


def test_links_are_broken_off_without_being_let_go(noted: Noted) -> None:
    noted.trainer.connect(generation()).abort()
    assert noted.notes[-1] == "aborted"


def test_whoever_waits_for_the_others_waits_in_short_looks_and_not_for_a_generation_that_is_over(noted: Noted) -> None:
    noted.trainer.connect(generation())
    (endpoint,) = noted.connected
    assert 0 < endpoint.deadline() <= session.GLANCE
    noted.is_over = True
    with pytest.raises(GenerationOver):
        endpoint.deadline()


@pytest.mark.parametrize(("slot", "is_told"), [(0, True), (1, False)])
def test_a_copy_is_told_by_who_hosts_the_first_lane(monkeypatch: pytest.MonkeyPatch, slot: int, is_told: bool) -> None:
    noted = Noted(monkeypatch, slot)
    links = noted.trainer.connect(generation(own=4, others=7))
    noted.notes.clear()
    noted.trainer.align(generation(own=4, others=7), links)
    assert noted.notes == ["copy at 7", "copied", *(["copied at 7 of 1.3: 123"] if is_told else [])]
    assert noted.trainer.cursor == Cursor(7)


def test_what_the_loop_has_reached_when_it_breaks_off_is_what_the_worker_holds(noted: Noted) -> None:
    links = noted.trainer.connect(generation())
    noted.ending = PeerLost("worker 1", "end of file")
    with pytest.raises(PeerLost):
        noted.trainer.train(generation(), links)
    assert (noted.trainer.cursor, noted.trainer.is_saved) == (Cursor(9), True)


class TestResult:
    def test_counts_what_it_has_trained_itself_over_all_its_generations(
        self, noted: Noted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
        links = noted.trainer.connect(generation())
        noted.trainer.train(generation(), links)  # from 400 samples to 900, from second 10 on
        noted.reached, noted.ending = replace(noted.reached, samples=1400), "complete"
        noted.trainer.train(generation(), links)
        digest, result = noted.trainer.result("complete")
        assert (digest, result["ending"], result["steps"]) == ("d", "complete", 9)
        assert result["samples_per_second"] == 200.0

    def test_of_no_time_at_all(self, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "perf_counter", lambda: 15.0)
        noted.trainer.train(generation(), noted.trainer.connect(generation()))
        assert noted.trainer.result("complete")[1]["samples_per_second"] == 0.0

    def test_has_the_best_and_the_bad_where_there_are_any(self, noted: Noted) -> None:
        noted.trainer.train(generation(), noted.trainer.connect(generation()))
        _, plain = noted.trainer.result("complete")
        assert plain["best"] is None
        assert "bad_samples" not in plain
        noted.trainer.progress = replace(noted.reached, best=Best(0.3, 6), bad=2)
        noted.validation[Source.VALIDATION] = [1, 2, 3]
        _, result = noted.trainer.result("complete")
        assert result["best"] == {"value": 0.3, "step": 6}
        assert result["bad_samples"] == {"training": 2, "validation": 0, "training_read": 902, "validation_read": 3}

    @pytest.mark.parametrize(("graphs", "told"), [(0, "a GPU"), (2, "a GPU, captured")])
    def test_says_how_a_device_was_used(self, noted: Noted, graphs: int, told: str) -> None:
        noted.trainer.train(generation(), noted.trainer.connect(generation()))
        assert not noted.trainer.result("complete")[1].keys() & {"computed_by", "device_memory"}
        parts, used = cast(Any, noted.trainer.parts), DeviceMemoryUse(5, 7, 9)
        parts.replica.device.is_host = False
        parts.replica.what_runs = lambda is_captured: "a GPU, captured" if is_captured else "a GPU"
        parts.graphs = SimpleNamespace(number=graphs)
        parts.memory = SimpleNamespace(look=lambda: used)
        _, result = noted.trainer.result("complete")
        assert result["computed_by"] == told
        assert result["device_memory"] == {"allocated_bytes": 5, "reserved_bytes": 7, "total_bytes": 9}


class TestWhatIsAskedFor:
    @pytest.mark.parametrize(
        ("asked", "request_"),
        [
            ({}, StepRequest()),
            ({"stop_requested": "interrupted"}, StepRequest("interrupted")),
            ({"break_requested": True}, StepRequest(leave=True)),
            ({"save_asked": True}, StepRequest(save=Save.BEGIN)),
            ({"save_requested": True}, StepRequest(save=Save.COMMIT, leave=True)),
            ({"save_requested": True, "save_asked": True}, StepRequest(save=Save.COMMIT, leave=True)),
        ],
    )
    def test_at_a_step_boundary(self, noted: Noted, asked: dict[str, Any], request_: StepRequest) -> None:
        vars(noted.view).update(asked)
        membership = noted.trainer.membership
        assert Membership.requested(membership) == request_
        noted.view.is_asked = False
        assert Membership.requested(membership) == StepRequest(), "nobody looks where nothing was ever asked for"

    @pytest.mark.parametrize(
        ("asked", "ends"), [({}, False), ({"break_requested": True}, True), ({"stop_requested": "interrupted"}, True)]
    )
    def test_ends_the_generation_for_whoever_disturbs_it(self, noted: Noted, asked: dict[str, Any], ends: bool) -> None:
        noted.trainer.connect(generation())
        assert noted.is_called is not None
        vars(noted.view).update(asked)
        assert noted.is_called() is ends
        noted.is_over = True
        with pytest.raises(GenerationOver):
            noted.is_called()


def test_links_close_what_is_built_on_them_first() -> None:
    notes: list[str] = []
    links = StrategyLinks(cast(Any, SimpleNamespace(close=lambda: notes.append("connection"))))
    links.callback(notes.append, "loop")
    links.close()
    assert notes == ["loop", "connection"]
