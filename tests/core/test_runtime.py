"""What every runtime promises to those who wait: the machine's own, and the simulator's in virtual time."""

from collections.abc import Callable

import pytest

from quorate.core.timing import Latch, Runtime, SystemRuntime
from simulation.clock import Process, VirtualClock
from simulation.threads import SimulatedRuntime

Body = Callable[[Runtime], None]


def on_the_machine(body: Body) -> None:
    body(SystemRuntime())


def in_virtual_time(body: Body) -> None:
    clock = VirtualClock()
    runtime, ended = SimulatedRuntime(Process(clock, "here")), list[bool]()

    def main() -> None:
        body(runtime)
        ended.append(True)

    runtime.spawn("main", main)
    while clock.advance():
        pass
    assert ended


@pytest.fixture(params=[on_the_machine, in_virtual_time])
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    return request.param  # type: ignore[no-any-return]


def test_who_waits_in_vain_is_told_so_when_the_time_is_over(run: Callable[[Body], None]) -> None:
    def body(runtime: Runtime) -> None:
        began, changed = runtime.now(), runtime.condition()
        with changed:
            assert not changed.wait_for(lambda: False, 0.05)
        assert 0.05 - 1e-6 <= runtime.now() - began < 60.0

    run(body)


def test_who_waits_sees_what_another_thread_has_changed(run: Callable[[Body], None]) -> None:
    def body(runtime: Runtime) -> None:
        changed, seen, told = runtime.condition(), list[str](), list[str]()

        def answer() -> None:
            with changed:
                changed.wait_for(lambda: bool(told))
                seen.append(f"{told[0]}, and back")
                changed.notify_all()

        thread = runtime.spawn("other", answer)
        with changed:
            told.append("there")
            changed.notify_all()
            assert changed.wait_for(lambda: bool(seen), 60.0)
        assert seen == ["there, and back"]
        thread.join()

    run(body)


def test_who_joins_a_thread_goes_on_when_it_has_ended(run: Callable[[Body], None]) -> None:
    def body(runtime: Runtime) -> None:
        done, may_work = list[str](), Latch(runtime)

        def work() -> None:
            may_work.wait(60.0)
            Latch(runtime).wait(0.05)
            done.append("worked")

        thread = runtime.spawn("other", work)
        assert done == []
        may_work.set()
        thread.join()
        thread.join()
        assert done == ["worked"]

    run(body)


def test_a_latch_ends_every_pause_once_it_is_set(run: Callable[[Body], None]) -> None:
    def body(runtime: Runtime) -> None:
        latch = Latch(runtime)
        assert not latch.wait(0.01)
        began = runtime.now()
        runtime.spawn("other", latch.set)
        assert latch.wait(600.0)
        assert latch.wait(600.0)
        assert latch.is_set
        assert runtime.now() - began < 200.0

    run(body)


def test_a_stopped_process_waits_longer_and_a_dead_one_never_goes_on() -> None:
    clock, done = VirtualClock(), list[str]()
    stopped, dead = Process(clock, "stopped"), Process(clock, "dead")
    runtimes = [SimulatedRuntime(process) for process in (stopped, dead)]
    for process, runtime in zip((stopped, dead), runtimes, strict=True):

        def work(process: Process = process, runtime: SimulatedRuntime = runtime) -> None:
            try:
                runtime.sleep(1.0)
                done.append(f"{process.place} at {clock.now}")
            finally:
                done.append(f"{process.place} ends")

        runtime.spawn("main", work)
    clock.after(0.5, stopped.stop)
    clock.after(0.5, dead.die)
    clock.after(3.0, stopped.go_on)
    while clock.advance():
        pass
    runtimes[1].end()
    assert done == ["stopped at 3.0", "stopped ends", "dead ends"]
