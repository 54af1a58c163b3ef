"""Fixtures of real services, and what holds for all tests with them."""

import os
import secrets
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from command import finished, undisturbed, used_workplace, workplace  # noqa: F401 (fixtures)
from services.browser import browser  # noqa: F401 (a fixture: one for all, since there can be only one at a time)
from services.servers import MlflowServer

# Ray reads these when it is imported, which collecting its tests does: their clusters are for those who know the token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a busy machine takes its time

# Their libraries are imported by the tests: without them `make test` has nothing to collect here.
collect_ignore_glob = ["test_*.py"] if find_spec("mlflow") is None else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lies here needs services. Warnings of their libraries are not ours to mend."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("services")
            if item.path.name.startswith("test_ray_"):
                item.add_marker("ray")
                if item.get_closest_marker("timeout") is None:
                    item.add_marker(pytest.mark.timeout(1800))  # a busy machine takes minutes until a job has begun
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def tracker_logs(tmp_path: Path) -> Iterator[None]:
    """Where a test fails, what the processes that track its runs have logged is shown with it."""
    yield
    for file in sorted(tmp_path.rglob("logs/tracker.jsonl")):
        print(file.read_text())


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """One for all tests that do not disturb it: use names of your own in it."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow-server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_mlflow_server(tmp_path: Path) -> Iterator[MlflowServer]:
    """One to kill and start again; it is not started yet."""
    (tmp_path / "mlflow-server").mkdir()
    server = MlflowServer(tmp_path / "mlflow-server")
    yield server
    server.kill()
