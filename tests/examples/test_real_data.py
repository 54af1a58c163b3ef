"""The examples on the data that they are about, fetched if it is not there: minutes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from examples.example_files import EXAMPLES, ROOT, module_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def data() -> Path:
    """The usual folder, with the small datasets whole in it."""
    script: Any = module_of(ROOT / "scripts" / "datasets.py")
    assert script.main([]) == 0, "the data could not be fetched"
    folder: Path = script.USUAL
    return folder


def train(workplace: Workplace, name: str, *arguments: str) -> dict[str, Any]:
    """Train from another folder than the examples': the data is found all the same."""
    command = ("train", str(EXAMPLES / f"{name}.yaml"), "--workers", "2", "--runs", "runs", "--json", *arguments)
    done = workplace.start(*command).done(within=1500)
    assert done.code == 0, done.stderr
    return done.document


def test_fashion_mnist_passes_ninety_per_cent(data: Path, workplace: Workplace) -> None:
    assert (data / "fashion-mnist").is_dir()
    assert train(workplace, "fashion_mnist")["final_metrics"]["accuracy"] > 0.9


def test_shakespeare_learns_to_spell_and_writes(data: Path, workplace: Workplace) -> None:
    assert (data / "shakespeare").is_dir()
    assert train(workplace, "shakespeare")["final_metrics"]["loss"] < 1.7
    write = [sys.executable, str(EXAMPLES / "shakespeare.py"), "last", "--prompt", "ROMEO.", "--length", "300"]
    written = subprocess.run(write, cwd=workplace.folder, capture_output=True, text=True, check=False)
    assert (written.returncode, written.stderr) == (0, "")
    assert written.stdout.startswith("ROMEO.")
    words = set((data / "shakespeare" / "shakespeare.txt").read_text().split())
    spelled = [word in words for word in written.stdout.split()]
    assert sum(spelled) / len(spelled) > 0.6, "most words are words"
