"""The live view of a job: what its pages say, from its first moment to its last, beside a real job and without one."""

import contextlib
import getpass
import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from command import PATIENCE, Workplace, await_condition, finished, used_workplace, workplace  # noqa: F401 (fixtures)
from made_events import make_event
from quorate.core.errors import RequestError
from quorate.core.failure import Failure
from quorate.observe.event import Event
from quorate.observe.events import RunFailed
from quorate.storage.run_folder import RunFolder
from quorate.tracking.prometheus import PrometheusView, Readiness, Scrapes
from tracking.metrics_read import shown, spec_of


def get(address: str, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{page}", timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def address_in(runs: Path) -> str | None:
    file = runs / "prometheus.json"
    entries = json.loads(file.read_text()) if file.exists() else []
    return entries[0]["targets"][0] if entries else None


def value(address: str, name: str) -> float:
    return sum(each for (known, _), each in shown(get(address, "/metrics")[1]).items() if known == name)


def step(number: int) -> Event:
    return make_event("step", number, {"samples": 8, "loss": 0.5})


def test_events_show_in_the_metrics_and_the_last_ones_before_the_end(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "tiny")
    view = PrometheusView(run, spec_of(track={"prometheus": 0}), workers=2, is_hurried=lambda: True)
    address = address_in(tmp_path)
    assert address is not None and address in view.notice
    for number in range(1, 101):
        view.handle(step(number))
    await_condition("all steps in the metrics", lambda: value(address, "quorate_steps_total") == 100)
    assert value(address, "quorate_events_dropped_total") == 0
    view.close()
    assert address_in(tmp_path) is None
    with pytest.raises(urllib.error.URLError):
        get(address, "/metrics")


def test_a_folder_that_cannot_be_written_does_not_keep_the_job_from_being_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder.create(tmp_path, "tiny")
    (tmp_path / "prometheus.json").mkdir()
    view = PrometheusView(run, spec_of(track={"prometheus": 0}), workers=2, is_hurried=lambda: True)
    with contextlib.closing(view):
        assert "does not list this job for Prometheus" in caplog.text
        assert get(view.notice.partition("http://")[2].partition("/")[0], "/metrics")[0] == 200


def test_without_a_coordinator_it_is_not_healthy_and_without_steps_not_ready(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "tiny")
    with contextlib.closing(PrometheusView(run, spec_of(track={"prometheus": 0}), workers=2)):
        address = address_in(tmp_path)
        assert address is not None
        assert get(address, "/healthz") == (503, "the coordinator is not up\n")
        assert get(address, "/readyz")[0] == 503
        # Whoever listened there is gone.
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        run.write_address(f"127.0.0.1:{port}", "token")
        code, why = get(address, "/healthz")
        assert code == 503 and "does not answer" in why


def test_steps_that_come_are_readiness_and_those_that_are_overdue_are_not() -> None:
    now = 100.0
    readiness = Readiness(patience=6.0, now=lambda: now)
    assert not readiness.is_ready()
    readiness.handle(make_event("generation", fields={"generation": "1.1"}))
    assert not readiness.is_ready()
    readiness.handle(step(1))
    assert readiness.is_ready()
    now += 5
    assert readiness.is_ready()
    now += 2
    assert not readiness.is_ready()
    readiness.handle(step(2))
    now += 60  # steps take 7 s: ten times that is waited
    assert readiness.is_ready()
    readiness.handle(make_event("generation", fields={"generation": "1.2"}))
    assert not readiness.is_ready()
    readiness.handle(step(3))
    readiness.handle(make_event("finished"))
    assert not readiness.is_ready()


def test_whoever_scrapes_is_expected_again_for_two_intervals() -> None:
    now = 0.0
    scrapes = Scrapes(now=lambda: now)
    assert not scrapes.may_come(), "nobody ever did"
    scrapes.note()
    now = 59.0
    assert scrapes.may_come(), "how often is not known yet"
    now = 61.0
    assert not scrapes.may_come()
    for _ in range(5):
        scrapes.note()
        now += 15
    now += 14
    assert scrapes.may_come()
    now += 2
    assert not scrapes.may_come(), "whoever it was has given up"


@pytest.mark.parametrize("gaps", [[14.0, 1.0] * 5, [15.0] * 5 + [1.0], [1.0]], ids=["two servers", "a look", "at once"])
def test_one_who_comes_soon_after_another_is_not_taken_for_the_same(gaps: list[float]) -> None:
    now = 0.0
    scrapes = Scrapes(now=lambda: now)
    scrapes.note()
    for gap in gaps:
        now += gap
        scrapes.note()
    now += 16
    assert scrapes.may_come()


def labels_of(address: str) -> dict[str, str]:
    (labels,) = (dict(labels) for name, labels in shown(get(address, "/metrics")[1]) if name == "quorate_up")
    return labels


def test_runs_of_one_name_in_two_folders_differ_by_their_id_and_one_that_is_moved_keeps_its_own(tmp_path: Path) -> None:
    found = []
    for folder in ("a", "b", "c"):
        if folder == "c":
            (tmp_path / "c").mkdir()
            (tmp_path / "a" / "tiny-0001").rename(tmp_path / "c" / "tiny-0001")
            run = RunFolder(tmp_path / "c" / "tiny-0001")
        else:
            run = RunFolder.create(tmp_path / folder, "tiny")
        with contextlib.closing(PrometheusView(run, spec_of(track={"prometheus": 0}), 2, is_hurried=lambda: True)):
            address = address_in(tmp_path / folder)
            assert address is not None
            found.append(labels_of(address))
    first, second, moved = found
    assert first["run"] == second["run"] == "tiny-0001" and first["run_id"] != second["run_id"]
    assert first == moved
    assert first["user"] == getpass.getuser()


class Closing:
    """A view that is closed beside the test, after a failure that was not scraped yet."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.is_hurried = False
        run = RunFolder.create(folder, "tiny")
        self._view = PrometheusView(run, spec_of(track={"prometheus": 0}), 2, self.said.append, lambda: self.is_hurried)
        self.address = str(address_in(folder))
        self.thread = threading.Thread(target=self._view.close)

    def scrape(self) -> dict[str, float]:
        text = get(self.address, "/metrics")[1]
        return {
            name: number for (name, _), number in shown(text).items() if name in ("quorate_up", "quorate_job_failed")
        }

    def fail(self) -> None:
        self._view.handle(RunFailed.of(Failure("UserCodeError", "trouble")))
        self.thread.start()


def test_a_failure_can_be_scraped_twice_after_the_end_and_then_the_endpoint_is_gone(tmp_path: Path) -> None:
    closing = Closing(tmp_path)
    assert closing.scrape() == {"quorate_up": 1, "quorate_job_failed": 0}
    closing.fail()
    await_condition("a word to the user", lambda: closing.said)
    assert "Ctrl-C ends the wait" in closing.said[0]
    assert address_in(tmp_path) == closing.address, "it is still listed"
    for _ in range(2):
        assert closing.scrape() == {"quorate_up": 0, "quorate_job_failed": 1}
    closing.thread.join(PATIENCE)
    assert not closing.thread.is_alive() and address_in(tmp_path) is None
    with pytest.raises(urllib.error.URLError):
        closing.scrape()


def test_nobody_waits_who_was_never_scraped_or_is_in_a_hurry(tmp_path: Path) -> None:
    unseen = Closing(tmp_path / "unseen")
    unseen.fail()
    unseen.thread.join(PATIENCE)
    assert not unseen.thread.is_alive() and not unseen.said
    hurried = Closing(tmp_path / "hurried")
    hurried.scrape()
    hurried.fail()
    await_condition("a word to the user", lambda: hurried.said)
    hurried.is_hurried = True
    hurried.thread.join(PATIENCE)
    assert not hurried.thread.is_alive()


def test_ctrl_c_ends_the_wait_for_prometheus(workplace: Workplace) -> None:  # noqa: F811
    runs = workplace.folder / "runs"
    running = workplace.start("train", "job.yaml", "--set", "track.prometheus=0", "--workers", "1", HOLD="9")
    address = await_condition("an address", lambda: address_in(runs))
    assert value(address, "quorate_up") == 1
    workplace.go()
    assert running.process.stderr is not None
    assert any("waiting for Prometheus to see the end" in line for line in running.process.stderr)
    assert address_in(runs) == address, "it is still listed"
    running.interrupt()
    done = running.done(within=50)  # less than is waited where there was only one scrape
    assert (done.code, workplace.result()["status"]) == (0, "complete")


def test_a_port_in_use_is_refused_before_anything_is_trained(workplace: Workplace) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = workplace.train("--set", f"track.prometheus={port}", "--workers", "1")
    assert done.code == 2
    assert f"127.0.0.1:{port}" in done.error and "Address already in use" in done.error
    assert workplace.runs() == []


def test_a_resume_that_is_refused_for_its_port_leaves_the_run_as_it_was(used_workplace: Workplace) -> None:  # noqa: F811
    before = (used_workplace.last / "job.yaml").read_text(), used_workplace.result()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = used_workplace.run("resume", "last", "--steps", "12", "--set", f"track.prometheus={port}")
    assert done.code == 2 and "Address already in use" in done.error
    assert ((used_workplace.last / "job.yaml").read_text(), used_workplace.result()) == before


def test_a_job_that_runs_is_healthy_ready_and_told_of_in_one_line(workplace: Workplace) -> None:  # noqa: F811
    runs = workplace.folder / "runs"
    # In the middle of its steps it waits for the file `go`.
    running = workplace.start("train", "job.yaml", "--set", "track.prometheus=0", "--workers", "2", HOLD="9")
    running.await_event("step", at_least=4)
    address = await_condition("an address", lambda: address_in(runs))
    await_condition("step 4 in the metrics", lambda: value(address, "quorate_last_step") >= 4)
    assert get(address, "/healthz") == (200, "ok\n")
    assert get(address, "/readyz") == (200, "ok\n")
    await_condition("both links", lambda: value(address, "quorate_link_latency_seconds") > 0)
    for _ in range(4):  # who looks so often is not waited for
        assert value(address, "quorate_exchange_bytes_total") > 0
    workplace.go()
    done = running.done()
    assert done.code == 0, done.stderr
    told = done.stdout + done.stderr
    assert told.count("http://127.0.0.1:") == 1 and f"http://{address}/metrics" in told
    assert address_in(runs) is None


def test_who_asks_for_an_address_that_cannot_be_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "tiny")
    with pytest.raises(RequestError):
        PrometheusView(run, spec_of(track={"prometheus": "203.0.113.7:9400"}), workers=1)
    assert not (tmp_path / "prometheus.json").exists()
