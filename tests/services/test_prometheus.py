"""A real Prometheus that scrapes a real job under faults: alerts fire and resolve, and every panel shows something."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import Running, Workplace, await_condition
from quorate.core.generation import server_id
from quorate.observe.event import DeviceMemoryUse
from quorate.observe.events import BlocksPlaced, HeldBlocks, StepCompleted
from quorate.observe.seldom_events import MachineLoad, StalenessObserved, SystemSampled
from quorate.observe.system import Gpus
from quorate.storage.run_folder import RunFolder
from quorate.tracking.prometheus import PrometheusView
from recorded_nvml import RecordedNvml
from services.prometheus_server import DEPLOY, RULES, WINDOW, PrometheusServer, quick_rules
from tracking.metrics_read import spec_of

pytestmark = pytest.mark.services

ROOT = DEPLOY.parent
LOST, FAILED = "QuorateWorkerLost", "QuorateCheckpointFailed"
JOB_FAILED, LAUNCHER_LOST = "QuorateJobFailed", "QuorateLauncherLost"


def load_dashboards() -> Any:
    spec = importlib.util.spec_from_file_location("dashboards", ROOT / "scripts" / "dashboards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboards"] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


dashboards = load_dashboards()


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )


# --- files


def test_the_rules_are_well_formed_and_each_is_tried_both_ways() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    cases = ROOT / "deploy" / "prometheus" / "tests" / "alerts.yaml"
    tried = promtool("test", "rules", str(cases))
    assert tried.returncode == 0, tried.stdout + tried.stderr
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    outcomes = {
        (case["alertname"], bool(case["exp_alerts"]))
        for test in yaml.safe_load(cases.read_text())["tests"]
        for case in test["alert_rule_test"]
    }
    assert outcomes == {(rule["alert"], fires) for rule in group["rules"] for fires in (True, False)}


def test_a_rule_that_is_wrong_fails_its_cases(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "alerts.yaml").write_text(RULES.read_text().replace("> 85", "> 95"))
    cases = (ROOT / "deploy" / "prometheus" / "tests" / "alerts.yaml").read_text()
    (tmp_path / "tests" / "alerts.yaml").write_text(cases)
    assert promtool("test", "rules", str(tmp_path / "tests" / "alerts.yaml")).returncode != 0


def test_the_configurations_are_well_formed() -> None:
    checked = promtool("check", "config", "deploy/prometheus/prometheus.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    alertmanager = ["amtool", "check-config", "deploy/alertmanager/alertmanager.yaml"]
    assert subprocess.run(alertmanager, cwd=ROOT, capture_output=True, check=False).returncode == 0
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose["services"].keys() == {"prometheus", "alertmanager", "grafana", "jaeger"}
    for service in compose["services"].values():
        mounted = [volume.split(":")[0] for volume in service.get("volumes", ())]
        assert all((DEPLOY / source).is_dir() for source in mounted if source.startswith("./"))


def test_the_dashboards_are_what_the_code_makes() -> None:
    made = {f"{board.name}.json": dashboards.text(board) for board in dashboards.BOARDS}
    assert made == {file.name: file.read_text() for file in (DEPLOY / "grafana" / "dashboards").iterdir()}
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "quorate.yaml").read_text())
    assert dashboards.SOURCE.uid in [source["uid"] for source in sources["datasources"]]


def test_every_query_of_the_files_is_one_that_is_tried() -> None:
    files = [json.loads(file.read_text()) for file in (DEPLOY / "grafana" / "dashboards").iterdir()]
    in_files = {target["expr"] for file in files for panel in file["panels"] for target in panel.get("targets", ())}
    assert in_files == {query for _, _, query in dashboards.queries()}


# --- a job under faults


@dataclass(frozen=True)
class Watched:
    prometheus: PrometheusServer
    workplace: Workplace
    running: Running

    @property
    def address(self) -> str:
        listed = json.loads((self.workplace.folder / "runs" / "prometheus.json").read_text())
        return str(next(one["targets"][0] for one in listed if one["labels"]["job"] == "tiny"))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A job that loses a worker when it has been scraped for a while, and goes on slowly until there is a file `go`."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "work" / "runs").mkdir(parents=True)
    workplace = Workplace(folder / "work")
    server = PrometheusServer(folder, workplace.folder / "runs")
    keys = {"steps": 1000, "checkpoint": {"every": 50, "keep": 3}, "evaluate": {"every": 100}}
    workplace.write_job(**keys)
    assert workplace.train("--workers", "2", "--json").code == 0
    workplace.write_job(**keys, track={"prometheus": 0, "system": 0.5})
    server.start()
    fault = ("--fault", "kill worker 1 at step 60", "--against", "last")
    running = workplace.start("chaos", "job.yaml", "--workers", "2", "--json", *fault, SLOW="0.05")
    try:
        running.await_event("lost")
        running.await_event("step", at_least=120)  # an evaluation and a checkpoint later
        yield Watched(server, workplace, running)
    finally:
        server.kill()
        workplace.clean_up()


def test_the_metrics_are_as_prometheus_wants_them(watched: Watched) -> None:
    with urllib.request.urlopen(f"http://{watched.address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    assert "quorate_steps_total" in text
    checked = promtool("check", "metrics", given=text)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_panel_shows_something(watched: Watched) -> None:
    gpus = Gpus(RecordedNvml("idle", "busy")).read()
    assert gpus
    runs = watched.workplace.folder / "runs"
    run = RunFolder.create(runs, "gpus")
    with run.lock():
        # Nobody has a GPU here: a job's view that is given what one has answered.
        view = PrometheusView(run, spec_of(name="gpus", track={"prometheus": 0}), workers=1)
        machine, used = MachineLoad(cpu_percent=1.0), DeviceMemoryUse(2**35, 2**36, 2**37)
        view.handle(SystemSampled(worker=0, host="node-1", machine=machine, gpus=gpus, device_memory=used))
        # Nor does it compute in float16, or log numbers of its own.
        view.handle(StepCompleted(step=1, loss_scale=1024.0, log={"own": 0.5}))
        # Nor has the job that is watched any servers.
        view.handle(BlocksPlaced(generation="1.1", servers=(HeldBlocks(server_id(0), 3, 2, 1024),)))
        missing: list[tuple[str, str, str]] = []

        def all_show() -> bool:
            # Again and again: a rate is seen of what grows.
            view.handle(StalenessObserved(step=20, from_step=10, updates={"0": 31, "2": 9}, gap=1, bound=4))
            missing[:] = [one for one in dashboards.queries() if not watched.prometheus.query(filled_in(one[2]))]
            return not missing

        try:
            await_condition("data in every panel", all_show, 60)
        except AssertionError:
            pytest.fail("\n".join(map(str, missing)))
        finally:
            view.close()


def filled_in(query: str) -> str:
    """As Grafana asks it, for all runs."""
    return query.replace("$__rate_interval", WINDOW).replace("$run", ".*")


def test_a_query_of_what_there_is_not_shows_nothing(watched: Watched) -> None:
    assert watched.prometheus.query("quorate_no_such_metric") == []


def test_the_loss_of_a_worker_fires_an_alert_that_resolves(watched: Watched) -> None:
    server = watched.prometheus
    await_condition("the alert", lambda: server.has_fired(LOST))
    await_condition("its end", lambda: not server.is_firing(LOST))
    assert server.query("sum(quorate_recoveries_total)") == [1]
    events = watched.workplace.events(watched.workplace.last)
    why = [event["reason"] for event in events if event["kind"] == "checkpoint_failed"]
    assert not server.has_fired(FAILED), f"nothing else is wrong: {why}"


def test_a_checkpoint_that_fails_fires_an_alert_until_the_next_one_is_saved(watched: Watched) -> None:
    server, run = watched.prometheus, watched.workplace.last
    checkpoints, aside = run / "checkpoints", run / "aside"
    checkpoints.rename(aside)
    checkpoints.write_text("in the way\n")
    try:
        watched.running.await_event("checkpoint_failed")
        await_condition("the alert", lambda: server.is_firing(FAILED))
    finally:
        checkpoints.unlink()
        aside.rename(checkpoints)
    await_condition("its end", lambda: not server.is_firing(FAILED))
    assert not server.is_firing(LOST)


def test_the_job_ends_with_the_bits_of_the_undisturbed_one_and_is_listed_no_more(watched: Watched) -> None:
    watched.workplace.go()
    done = watched.running.done(within=200)
    assert done.code == 0, done.stderr
    assert done.document["same"]
    assert json.loads((watched.workplace.folder / "runs" / "prometheus.json").read_text()) == []
    await_condition("its end", lambda: watched.prometheus.query("quorate_up") == [])


# --- how jobs end


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[tuple[PrometheusServer, Workplace]]:
    """One that looks as seldom as `deploy` has it: between two looks a job has long ended."""
    (tmp_path / "work" / "runs").mkdir(parents=True)
    workplace = Workplace(tmp_path / "work")
    server = PrometheusServer(tmp_path, workplace.folder / "runs", every="5s")
    server.start()
    yield server, workplace
    server.kill()
    workplace.clean_up()


def start_scraped(server: PrometheusServer, workplace: Workplace, **environment: str) -> Running:
    """A job that waits in its third step for the file `go`, and is known to Prometheus."""
    running = workplace.start("train", "job.yaml", "--workers", "2", "--set", "track.prometheus=0", **environment)
    await_condition("a scrape of the job", lambda: server.query("quorate_last_step") == [2])
    return running


def test_a_job_that_fails_fires_an_alert_and_its_lost_worker_none_any_more(
    ending: tuple[PrometheusServer, Workplace],
) -> None:
    server, workplace = ending
    running = start_scraped(server, workplace, HOLD="5", TROUBLE="loss")
    os.kill(workplace.workers()[1], signal.SIGKILL)
    await_condition("the alert of the lost worker", lambda: server.is_firing(LOST))
    workplace.go()
    done = running.done()
    assert done.code == 1 and "trouble in loss" in done.stderr
    await_condition("the alert", lambda: server.is_firing(JOB_FAILED))
    await_condition("the end of the other", lambda: not server.is_firing(LOST))
    await_condition("the end of its target", lambda: server.query("up") == [])
    assert not server.has_fired(LAUNCHER_LOST)


def test_a_launcher_that_is_killed_fires_an_alert_until_the_run_is_resumed(
    ending: tuple[PrometheusServer, Workplace],
) -> None:
    server, workplace = ending
    running = start_scraped(server, workplace, HOLD="5")
    running.process.kill()
    running.process.communicate()
    await_condition("the alert", lambda: server.is_firing(LAUNCHER_LOST))
    # Another launcher in the same folder does not have it forgotten.
    assert workplace.train("--workers", "1", "--set", "track.prometheus=0", HOLD="0").code == 0
    assert "tiny-0001" in (workplace.folder / "runs" / "prometheus.json").read_text(), "it is still seen to be down"
    assert not server.has_fired(JOB_FAILED)
    # Long enough to be scraped: it waits again.
    resumed = workplace.start("resume", "tiny-0001", "--set", "track.prometheus=0", HOLD="3")
    await_condition("its end", lambda: server.query("quorate_up == 1") and not server.is_firing(LAUNCHER_LOST))
    workplace.go()
    assert resumed.done().code == 0


def test_the_end_of_a_job_is_scraped_and_fires_nothing(ending: tuple[PrometheusServer, Workplace]) -> None:
    server, workplace = ending
    running = start_scraped(server, workplace, HOLD="5")
    workplace.go()
    assert running.done().code == 0
    assert server.query("last_over_time(quorate_up[1h])") == [0]
    await_condition("the end of its target", lambda: server.query("up") == [])
    assert not any(map(server.has_fired, (JOB_FAILED, LAUNCHER_LOST, LOST)))


def test_quick_rules_are_the_same_but_for_time() -> None:
    quick = yaml.safe_load(quick_rules(RULES.read_text()))
    slow = yaml.safe_load(RULES.read_text())
    names = [[rule["alert"] for rule in rules["groups"][0]["rules"]] for rules in (quick, slow)]
    assert names[0] == names[1]
    assert all(rule.get("for", "0s") == "0s" for rule in quick["groups"][0]["rules"])
