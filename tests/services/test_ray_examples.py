"""The examples on a Ray cluster of three nodes: the bits of one machine, whatever the number of workers."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ray_nodes import RayNodes
from examples.example_files import EXAMPLES, ROOT, module_of
from services.ray_training import ON_RAY, STRATEGIES, Training

TEXT = "To be, or not to be: that is the question.\n" * 40
JOBS = {
    "digits": {},
    "shakespeare": {"params.window": 12, "params.width": 16, "params.heads": 2, "params.layers": 2},
    "digits_parquet": {"params.width": 4},
}
SHORT = {"steps": 12, "epochs": "null", "evaluate.every": 6, "schedule": "null", "threads": 1}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(2, 2, 2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """What each example reads, small: the parameters that name it."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text(TEXT)
    shards: Any = module_of(ROOT / "scripts" / "shards.py")
    assert shards.main(["digits-parquet", "--to", str(folder), "--digits", "200", "--copies", "4"]) == 0
    for part in ("train", "validation"):
        place = folder / "digits-parquet" / part
        subprocess.run([sys.executable, "-m", "quorate", "data", "index", str(place)], check=True)
    return {
        "digits": {},
        "shakespeare": {"params.text": text},
        "digits_parquet": {"params.data": folder / "digits-parquet"},
    }


class Examples:
    """Trains examples, short; each on one machine once."""

    def __init__(self, nodes: RayNodes, data: dict[str, dict[str, Path]], folder: Path) -> None:
        self._nodes = nodes
        self._data = data
        self._folder = folder
        self._digests: dict[str, str] = {}

    def train(self, name: str, *options: str) -> dict[str, Any]:
        keys = {**SHORT, **JOBS[name], **self._data[name], "runs": self._folder / "runs"}
        told = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        return Training(EXAMPLES / f"{name}.yaml", self._nodes.environment, *told, *options).result()

    def digest(self, name: str) -> str:
        """What it has with `engine: local`."""
        if name not in self._digests:
            self._digests[name] = self.train(name, "--workers", "2")["weights_digest"]
        return self._digests[name]


@pytest.fixture(scope="module")
def examples(nodes: RayNodes, data: dict[str, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Examples:
    return Examples(nodes, data, tmp_path_factory.mktemp("examples"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_an_example_has_the_bits_of_one_machine(examples: Examples, name: str, workers: int, strategy: str) -> None:
    trained = examples.train(name, *ON_RAY, "--workers", str(workers), *STRATEGIES[strategy])
    assert trained["weights_digest"] == examples.digest(name)
    assert trained["steps"] == SHORT["steps"]
    assert trained["recoveries"] == []


def test_the_digests_tell_the_examples_and_their_seeds_apart(examples: Examples) -> None:
    other = examples.train("digits", "--workers", "1", "--set", "seed=8")["weights_digest"]
    assert len({other, *(examples.digest(name) for name in JOBS)}) == len(JOBS) + 1
