"""What events make of metrics, and that no event can make too many of them."""

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from made_events import EVERY, STEP, make_event
from quorate.coordinator.autopsy import autopsy_of_divergence, autopsy_of_exit, autopsy_of_no_return
from quorate.coordinator.events import ExitReported
from quorate.coordinator.states import JobSettings
from quorate.core.failure import Failure
from quorate.core.generation import GAVE_UP, WorkerStatus, server_id
from quorate.core.timing import Timing
from quorate.observe.event import DeviceMemoryUse, Event
from quorate.observe.events import (
    BlocksPlaced,
    EvaluationDone,
    GenerationFormed,
    HeldBlocks,
    HostedLanes,
    LinksMeasured,
    RunFailed,
    StepCompleted,
    WorkerLost,
)
from quorate.observe.recoveries import CAUSES, cause_of
from quorate.observe.seldom_events import GpuLoad, MachineLoad, StalenessObserved, SystemSampled
from quorate.tracking.metrics import MOST_GPUS, MOST_NAMES
from tracking.metrics_read import Scraped

MONITORING = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "monitoring.md"
KILLED = "worker 1 (pid 7 on host a) was killed by SIGKILL at step 3 while in compute. Often it is the kernel."


def formed(number: int, *workers: int, time: float = 0.0, from_step: int = 0) -> GenerationFormed:
    members = tuple(HostedLanes(worker, "a:1", (lane,)) for lane, worker in enumerate(workers))
    return GenerationFormed(time=time, generation=f"1.{number}", members=members, from_step=from_step)


def step(number: int, time: float = 0.0, **fields: float) -> StepCompleted:
    return StepCompleted(step=number, time=time, samples=8, losses={"": 0.5}, **fields)  # type: ignore[arg-type]


def test_a_step_is_counted_timed_and_shown() -> None:
    job = Scraped().handle(
        step(1, data_s=0.1, compute_s=0.2, exchange_s=0.3, apply_s=0.4), step(2, data_s=0.1, longest_data_s=0.5)
    )
    assert job["quorate_steps_total"] == 2
    assert job["quorate_samples_total"] == 16
    assert job["quorate_last_step"] == 2
    assert job["quorate_loss"] == 0.5
    assert job["quorate_step_seconds_sum"] == pytest.approx(1.1)
    assert job["quorate_phase_seconds_sum phase=exchange"] == pytest.approx(0.3)
    assert job["quorate_phase_seconds_count phase=apply"] == 2
    assert job["quorate_data_wait_seconds_total"] == pytest.approx(0.6)


def test_numbers_of_several_optimizers_stand_beside_each_other_and_a_loss_that_is_none_is_not_shown() -> None:
    job = Scraped().handle(STEP)
    assert job["quorate_loss optimizer=make"] == pytest.approx(0.3)
    assert job["quorate_learning_rate optimizer=judge"] == 0.2
    assert not any(("optimizer", "judge") in labels for name, labels in job.series if name == "quorate_loss")
    assert job["quorate_steps_skipped_total"] == 1
    assert job["quorate_steps_overflowed_total"] == 1
    assert job["quorate_loss_scale"] == 1024
    assert job["quorate_bad_samples_total"] == 2


def test_every_metric_has_the_run_and_a_help_text() -> None:
    job = Scraped().handle(*EVERY)
    assert all(("run", "tiny-0001") in labels for _, labels in job.series)
    names = re.findall(r"^# TYPE (\S+)", job.text, re.MULTILINE)
    helped = re.findall(r"^# HELP (\S+) .*[.]$", job.text, re.MULTILINE)
    assert names == helped
    assert all(name.startswith("quorate_") for name in names)
    assert not any(name.endswith("_created") for name, _ in job.series)


@pytest.mark.parametrize(("code", "failed"), [(1, 1), (2, 1), (130, 0), (143, 0)])
def test_a_job_that_has_failed_says_so_and_one_that_was_stopped_does_not(code: int, failed: int) -> None:
    job = Scraped()
    assert (job["quorate_up"], job["quorate_job_failed"]) == (1, 0)
    job.handle(RunFailed.of(Failure("UserCodeError", "trouble", exit_code=code)))
    assert (job["quorate_up"], job["quorate_job_failed"]) == (0, failed)


def test_every_metric_is_documented() -> None:
    job = Scraped().handle(*EVERY)
    job.handle(formed(1, 0, 1), LinksMeasured(generation="1.1", worker=0, peer=1, round_trip_s=1e-5, bytes_per_step=1))
    names = set(re.findall(r"^# TYPE (\S+)", job.text, re.MULTILINE))
    documented = set(re.findall(r"`(quorate_[a-z_]+)", MONITORING.read_text()))
    assert documented == names


def test_who_is_lost_is_alive_no_more_and_who_replaces_it_is() -> None:
    job = Scraped()
    assert job["quorate_workers state=alive"] == 0
    assert job["quorate_workers state=wanted"] == 2
    job.handle(formed(1, 0, 1))
    assert job["quorate_workers state=alive"] == 2
    job.handle(WorkerLost(worker=1, message=KILLED))
    assert job["quorate_workers state=alive"] == 1
    assert job["quorate_workers_lost_total cause=killed"] == 1
    job.handle(formed(2, 0), formed(3, 0, 1))
    assert job["quorate_workers state=alive"] == 2
    assert job["quorate_generation"] == 3
    job.handle(make_event("resize", fields={"before": 2, "workers": 4}))
    assert job["quorate_workers state=wanted"] == 4


def test_causes_are_there_before_anybody_is_lost() -> None:
    """Or the first loss would be no increase."""
    job = Scraped()
    for cause in CAUSES:
        assert job[f"quorate_workers_lost_total cause={cause}"] == 0
        assert job[f"quorate_recoveries_total cause={cause}"] == 0


def test_a_recovery_is_counted_with_the_first_new_step_and_once() -> None:
    job = Scraped().handle(formed(1, 0, 1), step(1, time=1.0), step(2, time=2.0))
    job.handle(
        WorkerLost(step=3, time=3.0, worker=1, message=KILLED, detect_s=0.25), formed(2, 0, time=4.0, from_step=2)
    )
    assert job["quorate_recoveries_total cause=killed"] == 0
    job.handle(step(3, time=6.0))
    assert job["quorate_recoveries_total cause=killed"] == 1
    assert job["quorate_recovery_seconds_sum cause=killed"] == pytest.approx(0.25 + 1 + 2)
    job.handle(formed(3, 0, 1, time=7.0, from_step=3), step(4, time=8.0), step(5, time=9.0))
    assert job["quorate_recoveries_total cause=killed"] == 1
    job.handle(
        WorkerLost(step=6, time=10.0, worker=0, message=KILLED, detect_s=0.25), formed(4, 1, time=11.0, from_step=5)
    )
    job.handle(step(6, time=12.0))
    assert job["quorate_recoveries_total cause=killed"] == 2


def test_the_cause_is_read_from_the_sentences_that_the_coordinator_writes() -> None:
    def exited(exit_code: int | None = None, signal: int | None = None) -> str:
        return autopsy_of_exit(ExitReported(1, 7, "a", exit_code, signal, WorkerStatus()), None).message

    settings = JobSettings(1, lanes=4, workers=2, timing=Timing(5.0))
    divergence = Failure("ReplicasDiffer", "replicas differ at step 3.", culprits=(1,))
    sentences = {
        exited(signal=9): "killed",
        exited(exit_code=1): "exited",
        exited(exit_code=0): "exited",
        exited(exit_code=GAVE_UP): "gave_up",
        autopsy_of_no_return(1, 7, settings).message: "silent",
        autopsy_of_divergence(divergence, (1, 7), None).message: "diverged",
        autopsy_of_divergence(divergence.at(kind="SettingsDiffer"), (1, 7), None).message: "diverged",
        "worker 1 (pid 7) has stood still for 700 s. That is longer than step_timeout (600).": "stalled",
        "it said: worker 1 (pid 7) was killed by SIGKILL": "other",
        "": "other",
    }
    assert {sentence: cause_of(sentence) for sentence in sentences} == sentences


def test_bytes_of_the_exchange_are_counted_for_steps_that_came_before_the_word_of_the_links() -> None:
    job = Scraped().handle(formed(1, 0, 1))
    first = LinksMeasured(generation="1.1", worker=0, peer=1, round_trip_s=2e-5, bytes_per_step=100)
    second = LinksMeasured(generation="1.1", worker=1, peer=0, round_trip_s=3e-5, bytes_per_step=50)
    job.handle(first, step(1), step(2), second, step(3, exchange_s=0.5))
    assert job["quorate_exchange_bytes_total worker=0"] == 300
    assert job["quorate_exchange_bytes_total worker=1"] == 150
    assert job["quorate_link_latency_seconds worker=1 peer=0"] == pytest.approx(3e-5)


def test_links_are_those_of_the_generation_that_is_at_work() -> None:
    job = Scraped().handle(
        formed(1, 0, 1), LinksMeasured(generation="1.1", worker=0, peer=1, round_trip_s=1.0, bytes_per_step=1)
    )
    job.handle(formed(2, 0))
    job.handle(LinksMeasured(generation="1.1", worker=0, peer=1, round_trip_s=1.0, bytes_per_step=1), step(1))
    assert not any(name == "quorate_link_latency_seconds" for name, _ in job.series)


def test_checkpoints_and_their_failures() -> None:
    job = Scraped()
    assert job["quorate_checkpoint_timestamp_seconds"] == job["quorate_checkpoint_failure_timestamp_seconds"] == 0
    job.handle(make_event("checkpoint_failed", 2, {"reason": "the disk is full"}))
    assert job["quorate_checkpoint_failure_timestamp_seconds"] > job["quorate_checkpoint_timestamp_seconds"]
    job.handle(make_event("checkpoint", 4, {"bytes": 100, "seconds": 2.0, "added_s": 0.5}))
    assert job["quorate_checkpoint_timestamp_seconds"] >= job["quorate_checkpoint_failure_timestamp_seconds"]
    assert job["quorate_checkpoints_total"] == job["quorate_checkpoint_failures_total"] == 1
    assert (job["quorate_checkpoint_bytes"], job["quorate_checkpoint_step"]) == (100, 4)
    assert job["quorate_checkpoint_wait_seconds_total"] == 0.5


def test_the_machine_and_its_gpus_are_shown_by_host_and_go_with_the_last_worker_there() -> None:
    job = Scraped()
    gpus = (GpuLoad(0, "H200", 97.0, 2**35, 2**37, 61.0, 512.5), GpuLoad(1))
    machine = MachineLoad(50.0, 3, 4, 1.0, 2.0, 3.0, 4.0, 5, 6)
    job.handle(
        SystemSampled(worker=0, host="a", cpu_percent=150.0, memory_bytes=7, threads=2, machine=machine, gpus=gpus)
    )
    job.handle(SystemSampled(worker=1, host="a", cpu_percent=50.0, device_memory=DeviceMemoryUse(1, 2, 8)))
    assert job["quorate_worker_cpu_ratio worker=0 host=a"] == 1.5
    assert job["quorate_machine_memory_used_bytes host=a"] == 3
    assert job["quorate_gpu_use_ratio gpu=0 host=a"] == 0.97
    assert job["quorate_gpu_temperature_celsius gpu=0 host=a"] == 61
    assert not any(("gpu", "1") in labels for _, labels in job.series), "nothing is known of it"
    assert job["quorate_worker_gpu_memory_reserved_bytes worker=1 host=a"] == 2
    assert job["quorate_worker_gpu_memory_total_bytes worker=1 host=a"] == 8
    job.handle(WorkerLost(worker=0, message=KILLED))
    assert not any(name.startswith(("quorate_machine", "quorate_gpu")) for name, _ in job.series)
    assert job["quorate_worker_cpu_ratio worker=1 host=a"] == 0.5


def test_what_a_machine_sends_is_counted_from_its_first_sample_on() -> None:
    job = Scraped()
    for time, rate in ((100.0, 7.0), (110.0, 3.0), (115.0, 2.0), (90.0, 5.0)):  # the clock of the last was set back
        machine = MachineLoad(network_sent_bytes_per_second=rate)
        job.handle(SystemSampled(worker=0, host="a", time=time, machine=machine))
        if time == 100.0:
            assert job["quorate_machine_network_sent_bytes_total host=a"] == 0
    assert job["quorate_machine_network_sent_bytes_total host=a"] == 10 * 3 + 5 * 2
    assert not any("disk_read" in name for name, _ in job.series), "nothing is known of it"


def test_who_has_left_a_job_that_was_made_smaller_is_shown_no_more() -> None:
    job = Scraped().handle(formed(1, 0, 1), *(SystemSampled(worker=worker, host="a", threads=3) for worker in (0, 1)))
    job.handle(formed(2, 0))
    assert [
        labels for name, labels in job.series if name == "quorate_worker_threads" and ("worker", "1") in labels
    ] == []
    assert job["quorate_worker_threads worker=0 host=a"] == 3


def test_the_end_of_a_job_is_shown() -> None:
    job = Scraped()
    assert job["quorate_up"] == 1
    job.handle(make_event("finished"))
    assert job["quorate_up"] == 0


# --- whatever is told, there are few series

NAMES = st.text(min_size=1, max_size=4)
WORKERS = st.integers(0, 10_000)
HOSTS = st.text(max_size=8)
GPUS = st.lists(st.builds(GpuLoad, index=st.integers(0, 10**6), use_percent=st.floats(0, 100)), max_size=3)
TOLD = st.one_of(
    st.builds(
        StepCompleted,
        step=st.integers(0, 10**9),
        losses=st.dictionaries(NAMES, st.floats(), max_size=3),
        gradient_norms=st.dictionaries(NAMES, st.floats(), max_size=3),
        data_s=st.floats(-1, 10),
    ),
    st.builds(EvaluationDone, metrics=st.dictionaries(NAMES, st.floats() | st.text() | st.booleans(), max_size=5)),
    st.builds(WorkerLost, worker=WORKERS, cause=st.text(), message=st.text() | st.just(KILLED)),
    st.builds(lambda number, workers: formed(number, *workers), st.integers(0, 3), st.lists(WORKERS, max_size=5)),
    st.builds(
        LinksMeasured,
        generation=st.integers(0, 3).map("1.{}".format),
        worker=WORKERS,
        peer=WORKERS,
        round_trip_s=st.floats(0, 1),
        bytes_per_step=st.integers(0, 2**40),
    ),
    st.builds(
        SystemSampled,
        worker=WORKERS,
        host=HOSTS,
        cpu_percent=st.floats(0, 100),
        machine=st.none() | st.builds(MachineLoad, cpu_percent=st.floats(0, 100)),
        gpus=GPUS.map(tuple),
    ),
)
PLACES = 4


@pytest.mark.long
@given(st.lists(TOLD, max_size=40))
def test_the_number_of_series_has_a_bound(told: list[Event]) -> None:
    job = Scraped(lanes=PLACES)
    at_first = len(job.series)
    job.handle(*told)
    by_name: dict[str, int] = {}
    for name, labels in job.series:
        by_name[name] = by_name.get(name, 0) + 1
        values = dict(labels)
        assert int(values.get("worker", 0)) < PLACES and int(values.get("peer", 0)) < PLACES
        assert values.get("cause", "other") in CAUSES
    assert at_first <= len(job.series)
    assert all(
        by_name.get(f"quorate_{name}", 0) <= MOST_NAMES
        for name in ("loss", "gradient_norm", "logged", "validation_metric")
    )
    assert by_name.get("quorate_worker_cpu_ratio", 0) <= PLACES
    assert by_name.get("quorate_machine_cpu_ratio", 0) <= PLACES
    assert by_name.get("quorate_gpu_use_ratio", 0) <= PLACES * MOST_GPUS
    assert by_name.get("quorate_link_latency_seconds", 0) <= PLACES


def test_a_task_that_makes_up_names_is_not_followed_for_ever() -> None:
    job = Scraped()
    for number in range(10 * MOST_NAMES):
        job.handle(EvaluationDone(metrics={f"metric {number}": 1.0}))
    assert sum(name == "quorate_validation_metric" for name, _ in job.series) == MOST_NAMES
    job.handle(EvaluationDone(metrics={"metric 0": 2.0, "metric 5000": 2.0}))
    assert 2.0 in [value for (name, _), value in job.series.items() if name == "quorate_validation_metric"]


def test_what_a_task_logs_is_shown_as_it_was_last() -> None:
    job = Scraped().handle(StepCompleted(step=1, log={"own": 0.25, "word": "none"}))
    job.handle(StepCompleted(step=2))
    assert [value for (name, _), value in job.series.items() if name == "quorate_logged"] == [0.25]


def test_more_gpus_than_a_host_has_are_not_shown() -> None:
    job = Scraped()
    gpus = tuple(GpuLoad(index, use_percent=1.0) for index in range(10 * MOST_GPUS))
    job.handle(SystemSampled(worker=0, host="a", machine=MachineLoad(), gpus=gpus))
    assert sum(name == "quorate_gpu_use_ratio" for name, _ in job.series) == MOST_GPUS


def test_what_servers_hold_is_told_of_jobs_that_have_any() -> None:
    job = Scraped()
    assert "quorate_server" not in job.text
    held = (HeldBlocks(server_id(0), 2, 1, 32), HeldBlocks(server_id(1), 3, 2, 40))
    job.handle(BlocksPlaced(generation="1.1", blocks=3, bytes=48, servers=held))
    assert job["quorate_servers"] == 2
    assert job["quorate_server_blocks server=1"] == 3
    assert job["quorate_server_bytes server=0"] == 32


def test_staleness_is_a_histogram_of_jobs_that_have_any() -> None:
    job = Scraped()
    assert "quorate_staleness" not in job.text
    job.handle(StalenessObserved(step=10, updates={"0": 3, "2": 1}, gap=2, bound=4))
    job.handle(StalenessObserved(step=20, updates={"2": 2, "300": 1}, gap=1, bound=4))
    assert job["quorate_staleness_updates_bucket le=0.0"] == 3
    assert job["quorate_staleness_updates_bucket le=2.0"] == 6
    assert job["quorate_staleness_updates_count"] == 7
    assert job["quorate_staleness_updates_sum"] == 306
    assert job["quorate_staleness_gap_steps"] == 1
