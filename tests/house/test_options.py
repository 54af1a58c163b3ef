"""Options stand apart from the core: in the table of tests, and in what a worker imports that uses none."""

import subprocess
import sys
from pathlib import Path

import pytest

from options import OPTIONS, ROOMS

ROOT = Path(__file__).resolve().parents[2]


def test_each_pattern_is_of_a_file_that_is_there() -> None:
    for option, patterns in OPTIONS.items():
        for pattern in patterns:
            assert any((ROOT / "tests").glob(pattern.partition("::")[0])), f"{option}: {pattern}"


@pytest.mark.usefixtures("cold")
def test_a_ring_worker_imports_nothing_of_an_option() -> None:
    told = subprocess.run(
        [sys.executable, str(ROOT / "scripts/house.py"), "--imports"], stdout=subprocess.PIPE, text=True, check=True
    )
    imported = told.stdout.split()
    assert "quorate.training.loop" in imported, "these are the modules of a worker"
    for option, prefixes in ROOMS.items():
        # Its section of the job file is there, for whoever asks what may be written.
        found = [module for module in imported if module.startswith(prefixes) and not module.endswith(".option")]
        assert not found, f"{option}: {found}"


def test_who_starts_a_job_on_this_machine_imports_no_store() -> None:
    code = "import sys, quorate.api.session; print(*(name for name in sys.modules if name.startswith('quorate.')))"
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    imported = told.stdout.split()
    assert "quorate.storage.objects" in imported, "these are the modules of a launcher"
    assert not [module for module in imported if module.startswith("quorate.stores")]
