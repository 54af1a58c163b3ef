import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.chaos.script import (
    FORMS,
    NOMINAL_STEP,
    PHASES,
    Act,
    Fault,
    FaultError,
    Whom,
    check_script,
    lines_of,
    parse_duration,
    parse_fault,
    parse_mean,
    parse_script,
    random_script,
)
from quorate.chaos.supervisor_hook import FaultInjection
from quorate.chaos.worker_hook import FaultWatch
from quorate.worker.assignment import Assignment

workers = st.none() | st.integers(0, 99)
steps = st.integers(1, 10**9)
phases = st.none() | st.sampled_from(list(PHASES))
times = st.integers(1, 86_400 * 10**6).map(lambda microseconds: microseconds / 10**6)
delays = st.none() | times
kills = st.builds(Fault, st.just(Act.KILL), workers, steps, phases, after=delays)
stops = st.builds(Fault, st.just(Act.STOP), workers, steps, phases, times, delays)
factors = st.integers(1_000_001, 1000 * 10**6).map(lambda millionths: millionths / 10**6)
slows = st.builds(Fault, st.just(Act.SLOW), workers, steps, factor=factors)
terms = st.builds(Fault, st.just(Act.TERM), workers, steps, phases, after=delays)
outside = st.sampled_from([Whom.COORDINATOR, Whom.LAUNCHER])
deaths = st.builds(Fault, st.just(Act.KILL), st.none(), steps, phases, whom=outside)
loaders = st.builds(
    Fault, st.just(Act.KILL), st.integers(0, 99), steps, phases, after=delays, whom=st.just(Whom.LOADER)
)
memory = st.builds(Fault, st.sampled_from([Act.FLIP, Act.STARVE]), st.integers(0, 99), steps, phases)
cuts = st.builds(Fault, st.just(Act.CUT), st.integers(0, 99), steps, phases, times)
resizes = st.builds(Fault, st.sampled_from([Act.ADD, Act.REMOVE]), st.none(), steps, phases)
corruptions = st.builds(Fault, st.just(Act.CORRUPT), st.integers(0, 99), steps, is_same=st.booleans())
faults = kills | stops | slows | corruptions | terms | deaths | loaders | memory | cuts | resizes


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill worker 1 at step 20", Fault(Act.KILL, 1, 20)),
        ("stop worker 0 at step 15 for 3s", Fault(Act.STOP, 0, 15, None, 3.0)),
        ("kill all at step 40", Fault(Act.KILL, None, 40)),
        ("  Kill  WORKER 2 at step 7 in exchange ", Fault(Act.KILL, 2, 7, "exchange")),
        ("stop all at step 1 for 250ms in join", Fault(Act.STOP, None, 1, "join", 0.25)),
        ("stop worker 3 at step 9 in forward for 2min", Fault(Act.STOP, 3, 9, "forward", 120.0)),
        ("kill worker 1 at step 20 in exchange after 5ms", Fault(Act.KILL, 1, 20, "exchange", after=0.005)),
        ("kill all at step 20 after 1.5s", Fault(Act.KILL, None, 20, after=1.5)),
        ("stop worker 1 at step 2 for 3s after 0.2ms in apply", Fault(Act.STOP, 1, 2, "apply", 3.0, 0.0002)),
        ("slow worker 1 4x from step 10", Fault(Act.SLOW, 1, 10, factor=4.0)),
        ("corrupt worker 1 from step 10", Fault(Act.CORRUPT, 1, 10)),
        ("corrupt worker 1 from step 10 in one bit", Fault(Act.CORRUPT, 1, 10, is_same=True)),
        ("Slow all 1.5X from step 2", Fault(Act.SLOW, None, 2, factor=1.5)),
        ("kill coordinator at step 30", Fault(Act.KILL, None, 30, whom=Whom.COORDINATOR)),
        ("kill launcher at step 30 in checkpoint", Fault(Act.KILL, None, 30, "checkpoint", whom=Whom.LAUNCHER)),
        ("cut worker 2 at step 10 for 8s", Fault(Act.CUT, 2, 10, None, 8.0)),
        ("term worker 1 at step 5", Fault(Act.TERM, 1, 5)),
        ("add worker at step 12", Fault(Act.ADD, None, 12)),
        ("remove worker at step 20", Fault(Act.REMOVE, None, 20)),
    ],
)
def test_a_fault_is_read_as_it_is_written(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text",
    [
        "kill worker 1 at step 20 in exchange after 5ms",
        "kill all at step 2 after 1.5s",
        "stop worker 0 at step 15 in forward after 0.25ms for 300ms",
        "slow worker 1 4x from step 10",
        "slow all 2.5x from step 1",
        "flip worker 1 at step 60",
        "starve worker 0 at step 3 in exchange",
        "kill loader of worker 2 at step 9 in data",
    ],
)
def test_a_fault_is_printed_as_people_write_it(text: str) -> None:
    assert str(parse_fault(text)) == text


@given(faults)
def test_a_fault_is_written_as_it_is_read(fault: Fault) -> None:
    assert parse_fault(str(fault)) == fault


@given(st.lists(faults))
def test_faults_travel_to_the_worker_as_they_are(script: list[Fault]) -> None:
    plain = Assignment("run", 0, 1, "t:T", {}, "", "127.0.0.1:1", "token")
    assert plain.make_hook(lambda *_: None) is None
    sent = FaultInjection(script, Path("logs")).on_start(plain)
    assert json.loads(sent.to_json())
    received = Assignment.from_json(sent.to_json())
    assert received == sent
    hook = received.make_hook(lambda *_: None)
    assert isinstance(hook, FaultWatch)
    assert hook._faults == tuple(script)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "`` is not understood; a fault is written such as `"),
        ("kil worker 1 at step 20", "is not understood; a fault is written such as `kill worker 1 at step 20`"),
        ("explode worker 1 at step 20", "is not understood"),
        ("stop coordinator at step 3 for 1s", "such as `stop worker 0 at step 15 for 3s`"),
        ("cut all at step 3 for 1s", "such as `cut worker 2 at step 10 for 8s`"),
        ("cut worker 1 at step 3", "it does not say for how long: add a time, such as `for 3s`"),
        ("term worker 1 at step 3 for 2s", "term does not last: leave out `for`"),
        ("add worker 3 at step 3", "such as `add worker at step 12`"),
        ("kill loader at step 3", "is not understood"),
        ("starve all at step 3", "such as `starve worker 1 at step 10`"),
        ("kill coordinator at step 3 after 5ms", "`after` is for signals to a worker"),
        ("kill wroker 1 at step 20", "such as `kill worker 1 at step 20`"),
        ("kill worker one at step 20", "such as `kill worker 1 at step 20`"),
        ("kill worker -1 at step 20", "such as `kill worker 1 at step 20`"),
        ("kill worker 1", "such as `kill worker 1 at step 20`"),
        ("kill worker 1 at step 0", "is not understood"),
        ("kill worker 1 at step 20 in exchang", "the phases are data, forward, exchange, apply, evaluation"),
        ("kill worker 1 at step 20 in data in apply", "such as `kill worker 1 at step 30 in exchange"),
        ("stop worker 1 at step 20 for 1s for 2s", "is not understood"),
        ("kill worker 1 at step 20 during apply", "is not understood"),
        ("kill worker 1 at step 20 after", "is not understood"),
        ("kill worker 1 at step 20 after 5", "`kill worker 1 at step 20 after 5`: `5` is not a time up to a day"),
        ("kill worker 1 at step 20 after apply", "`apply` is not a time up to a day: write a number and a unit"),
        ("stop worker 1 at step 20", "it does not say for how long: add a time, such as `for 3s`"),
        ("kill worker 1 at step 20 for 3s", "kill does not last: leave out `for`"),
        ("stop worker 1 at step 20 for 0s", "`0s` is not a time"),
        ("stop worker 1 at step 20 for 25000min", "`25000min` is not a time"),
        ("slow worker 1 from step 10", "such as `slow worker 1 4x from step 10`"),
        ("corrupt worker 1 from step 10 in two bits", "such as `corrupt worker 1 from step 10 in one bit`"),
        ("kill worker 1 from step 10 in one bit", "is not understood"),
        ("slow worker 1 1x from step 10", "write a number above 1 and up to 1000 before the x"),
        ("slow worker 1 1001x from step 10", "write a number above 1 and up to 1000 before the x"),
        ("slow worker 1 4x at step 10", "such as `slow worker 1 4x from step 10`"),
        ("slow worker 1 4x from step 10 for 3s", "such as `slow worker 1 4x from step 10`"),
    ],
)
def test_a_mistake_is_told_with_the_nearest_form(text: str, why: str) -> None:
    with pytest.raises(FaultError) as mistake:
        parse_fault(text)
    assert why in mistake.value.message
    assert mistake.value.exit_code == 2


@given(st.text())
def test_whatever_is_written_is_read_or_refused_in_words(text: str) -> None:
    try:
        parse_fault(text)
    except FaultError as mistake:
        assert mistake.message


def test_each_form_that_is_shown_is_read() -> None:
    assert len(parse_script(lines_of(FORMS, "forms"))) == 19


def test_every_mistake_of_a_script_is_told_at_once_with_its_place() -> None:
    text = "# a script\nkill worker 1 at step 20  # the first\n\nkil all at step 3\nkill all at step x\n"
    with pytest.raises(FaultError) as mistake:
        parse_script(lines_of(text, "faults.txt"))
    first, second = mistake.value.message.splitlines()
    assert first.startswith("faults.txt, line 4: `kil all at step 3` ")
    assert second.startswith("faults.txt, line 5: `kill all at step x` ")
    assert parse_script(lines_of(text, "f")[:1]) == (Fault(Act.KILL, 1, 20),)


def test_a_script_that_does_not_fit_its_job_is_refused() -> None:
    script = (Fault(Act.KILL, 2, 5), Fault(Act.KILL, None, 11), Fault(Act.KILL, 1, 10))
    with pytest.raises(FaultError) as mistake:
        check_script(script, workers=2, steps=10, lanes=4)
    assert mistake.value.message.splitlines() == [
        "`kill worker 2 at step 5`: there is no worker 2; the job runs on workers 0 to 1",
        "`kill all at step 11`: there is no step 11; the job has 10 steps",
    ]
    check_script(script, workers=3, steps=None, lanes=4)


def test_a_script_that_resizes_its_job_is_held_against_what_it_has_by_then() -> None:
    check_script([Fault(Act.ADD, None, 3), Fault(Act.KILL, 2, 5)], workers=2, steps=10, lanes=3)
    with pytest.raises(FaultError) as mistake:
        check_script([Fault(Act.KILL, 1, 5), Fault(Act.REMOVE, None, 3), Fault(Act.REMOVE, None, 9)], 2, 10, lanes=2)
    assert mistake.value.message.splitlines() == [
        "`kill worker 1 at step 5`: there is no worker 1; the job runs on worker 0 only",
        "`remove worker at step 9`: the job has 1 workers by then, and can have 1 to 2",
    ]


@settings(deadline=None)  # the first call may wait for a busy machine
@given(st.integers(), st.integers(1, 500), st.integers(1, 8), st.floats(0.1, 1e4), st.booleans())
def test_chance_writes_the_same_script_each_time_and_one_that_fits_the_job(
    seed: int, steps: int, workers: int, mean: float, can_cut: bool
) -> None:
    script = random_script(seed, steps, workers, mean, lanes=8, can_cut=can_cut, saves_every=3)
    assert script == random_script(seed, steps, workers, mean, lanes=8, can_cut=can_cut, saves_every=3)
    check_script(script, workers, steps, lanes=8)
    assert can_cut or not any(fault.act is Act.CUT for fault in script)
    assert list(script) == sorted(script, key=lambda fault: fault.step)
    assert parse_script(lines_of("\n".join(map(str, script)), "again")) == script


def test_chance_keeps_to_the_mean_and_heeds_the_seed() -> None:
    counts = [len(random_script(seed, steps=1000, workers=4, mean=50.0, lanes=8)) for seed in range(200)]
    assert 18 < sum(counts) / len(counts) < 22
    assert len({random_script(seed, 1000, 4, 50.0, lanes=8) for seed in range(200)}) == 200
    drawn = [
        fault
        for seed in range(20)
        for fault in random_script(seed, 1000, 4, 50.0, lanes=8, can_cut=True, saves_every=100, has_loaders=True)
    ]
    # Few lanes are audited: one that computes wrongly would hardly ever be found.
    assert {fault.act for fault in drawn} == set(Act) - {Act.CORRUPT}
    assert {fault.whom for fault in drawn if fault.act is Act.KILL} == {None, *Whom} - {Whom.SERVER}
    assert all(fault.step > 200 for fault in drawn if fault.whom is Whom.LAUNCHER), "nothing to resume from"


def test_a_mean_is_given_in_steps_or_in_time() -> None:
    assert [parse_mean(text) for text in ("20", "20 steps", "20steps", "1 step")] == [20, 20, 20, 1]
    assert parse_mean("5s") == 5 / NOMINAL_STEP
    assert parse_duration("5s") == 5.0
    for wrong in ("0", "five", "-3", "5 s"):
        with pytest.raises(FaultError):
            parse_mean(wrong)


@pytest.mark.parametrize(
    ("fault", "moment", "is_due"),
    [
        ("kill worker 0 at step 5", (5, "data"), True),
        ("kill worker 0 at step 5", (4, "data"), False),
        ("kill worker 0 at step 5", (5, "compute"), False),
        ("kill worker 0 at step 5", (7, "data"), True),  # it was away at step 5
        ("kill worker 0 at step 5 in forward", (5, "compute"), True),
        ("kill worker 0 at step 5 in evaluation", (6, "evaluation"), True),
        ("kill worker 0 at step 5 in evaluation", (4, "evaluation"), False),
        ("kill worker 0 at step 5 in join", (4, "join"), True),  # step 4 is complete, and step 5 comes next
        ("kill worker 0 at step 5 in join", (3, "join"), False),
        ("kill worker 0 at step 5 in copy", (9, "copy"), True),
    ],
)
def test_a_fault_is_due_at_its_step_or_the_first_such_moment_after_it(
    fault: str, moment: tuple[int, str], is_due: bool
) -> None:
    assert parse_fault(fault).is_due(*moment) is is_due
