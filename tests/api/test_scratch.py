"""Folders that are thrown away, also those of a process that was killed."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quorate.api.scratch import SCRATCH, scratch_folder
from quorate.core.errors import RequestError
from quorate.storage.run_folder import RunFolder

KILLED = """
import os, signal, sys
from quorate.api.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "run").mkdir()
    (folder / "run" / "events.jsonl").write_text("{}")
    print(folder, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_it_is_gone_with_its_content_when_the_block_ends(temporary: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch_folder() as folder:
        (folder / "held").mkdir()
        assert list(temporary.iterdir()) == [folder]
        raise ZeroDivisionError
    assert list(temporary.iterdir()) == []


def test_one_whose_owner_was_killed_is_removed_by_the_next_and_one_that_is_in_use_is_not(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with scratch_folder() as mine, scratch_folder() as another:
            assert {left, mine, another} == set(temporary.iterdir()), "all three are in use"
        other.communicate("")
        assert other.returncode == -9
    assert list(temporary.iterdir()) == [left]
    with scratch_folder() as folder:
        assert list(temporary.iterdir()) == [folder]


def test_what_others_have_called_like_it_is_left_alone(temporary: Path) -> None:
    run = RunFolder.create(temporary, SCRATCH.rstrip("-"))
    with run.lock():
        pass
    (temporary / f"{SCRATCH}notes").mkdir()
    (temporary / f"{SCRATCH}link").symlink_to(temporary / "nowhere")
    before = sorted(temporary.rglob("*"))
    with scratch_folder():
        pass
    assert sorted(temporary.rglob("*")) == before


def test_a_place_where_none_can_be_made_is_told(temporary: Path) -> None:
    temporary.rmdir()
    with pytest.raises(RequestError, match=r"No such file.* Choose another with TMPDIR"), scratch_folder():
        pass
