import subprocess
import sys
from importlib.metadata import version

import pytest

from command import Workplace

NO_TORCH = """
import sys
sys.argv = ["quorate", *{arguments!r}]
from quorate.cli.main import run
try:
    run()
finally:
    assert "torch" not in sys.modules, "torch was imported"
    assert "grpc" not in sys.modules, "grpc was imported"
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["train", "resume", "same bits on any number"]),
        (["train", "--help"], ["JOB.yaml", "--workers", "--set", "--json", "Ctrl-C", "Example:"]),
        (["resume", "--help"], ["RUN", "--branch", "last", "Example:"]),
        (["--version"], [f"quorate {version('quorate')}"]),
    ],
)
def test_help_answers_without_torch(arguments: list[str], words: list[str]) -> None:
    code = NO_TORCH.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for word in words:
        assert word in " ".join(done.stdout.split())


def test_the_module_is_the_command(workplace: Workplace) -> None:
    assert workplace.run("--version").stdout == f"quorate {version('quorate')}\n"
