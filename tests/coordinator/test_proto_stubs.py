"""The generated stubs belong to the messages as they are written."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_current() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "proto.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
