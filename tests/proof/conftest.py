from collections.abc import Iterator

import pytest

from command import finished, undisturbed, used_workplace, workplace  # noqa: F401 (fixtures)
from proof.proven_runs import trained
from quorate.api.warm import WarmRunner
from quorate.storage.run_folder import RunFolder


@pytest.fixture(scope="session")
def runner() -> Iterator[WarmRunner]:
    with WarmRunner() as kept:
        yield kept


@pytest.fixture(scope="session")
def run(runner: WarmRunner, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of 20 steps with a checkpoint after every fourth, and of the best: to be read."""
    return trained(runner, tmp_path_factory.mktemp("proven"))
