from pathlib import Path

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from object_store import BUCKET, SeaweedStore, s3, seaweed
from quorate.core.errors import RunError
from quorate.engines.ray.shared_storage import Reach, share, why_out_of_reach
from quorate.storage.run_folder import RunFolder, write_creation
from quorate.stores.objects import FsspecStore

__all__ = ["s3", "seaweed"]


def run_in(folder: Path) -> RunFolder:
    run = RunFolder(folder / "run-0001")
    (run.checkpoints / "step-1").mkdir(parents=True)
    (run.checkpoints / "step-1" / "part").write_text("weights")
    run.events_file.write_text("first\n")
    write_creation(run.path)
    return run


def test_what_a_run_has_at_home_moves_to_its_storage_and_is_found_at_home(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    shared = share(run, tmp_path / "storage")
    assert (shared.checkpoints / "step-1" / "part").read_text() == "weights"
    with shared.events_file.open("a") as file:
        file.write("second\n")
    assert run.events_file.read_text() == "first\nsecond\n"
    assert share(run, tmp_path / "storage").path == shared.path, "which changes nothing"
    assert run.events_file.read_text() == "first\nsecond\n"


def test_a_run_that_is_given_another_storage_keeps_what_it_has(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    share(run, tmp_path / "old")
    shared = share(run, tmp_path / "new")
    assert (shared.checkpoints / "step-1" / "part").read_text() == "weights"
    assert run.events_file.read_text() == "first\n"
    assert run.events_file.resolve() == shared.events_file.resolve()


def test_a_storage_that_has_another_run_of_this_name_is_refused_and_that_one_is_left_alone(tmp_path: Path) -> None:
    first, second = run_in(tmp_path / "mine"), run_in(tmp_path / "yours")
    shared = share(first, tmp_path / "storage")
    second.events_file.write_text("second\n")
    with pytest.raises(RunError, match="another run of this name"):
        share(second, tmp_path / "storage")
    assert shared.events_file.read_text() == "first\n"
    assert second.events_file.read_text() == "second\n"
    share(first, tmp_path / "elsewhere")
    assert share(first, tmp_path / "storage").path == shared.path, "it comes back to its own"


def test_the_address_that_hosts_share_is_removed_with_its_token(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    shared = share(run, tmp_path / "storage")
    shared.write_address("127.0.0.1:1", "token")
    assert run.read_address("token") == "127.0.0.1:1"
    run.remove_address()
    assert not shared.address_file.exists()


def test_what_a_launcher_that_was_killed_has_asked_is_removed_and_hosts_answer_the_next(tmp_path: Path) -> None:
    Reach(str(tmp_path))
    reach = Reach(str(tmp_path))
    assert len(list(tmp_path.glob(".reach-*"))) == 1
    assert reach.trouble_of("host", "") == "what it writes there is not seen here"
    assert why_out_of_reach(reach.place, reach.nonce, "host") == ""
    assert reach.trouble_of("host", "") == ""
    assert "no such folder" in why_out_of_reach(str(tmp_path / "other"), reach.nonce, "host")
    reach.close()
    assert list(tmp_path.iterdir()) == []


def test_hosts_answer_in_a_store_as_well_and_nothing_is_left(s3: SeaweedStore, tmp_path: Path) -> None:
    place = f"s3://{BUCKET}/{tmp_path.name}/run"
    reach = Reach(place)
    assert reach.trouble_of("host", "") == "what it writes there is not seen here"
    assert why_out_of_reach(place, reach.nonce, "host") == ""
    assert reach.trouble_of("host", "") == ""
    assert "no such folder" in why_out_of_reach(f"{place}-of-another", reach.nonce, "host")
    reach.close()
    assert FsspecStore(place).list() == {}


def test_a_store_that_replaces_what_is_to_be_created_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A kind of store whose library takes no notice of the condition.
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda self, path, value, **_: AbstractFileSystem.pipe_file(self, path, value)
    )
    with pytest.raises(RunError, match="If-None-Match"):
        Reach("memory://bucket/run")
