import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quorate.core import runs_folder
from quorate.core.errors import DamagedFileError, JobError, RunError
from quorate.core.runs_folder import is_search
from quorate.storage import run_folder
from quorate.storage.atomic import temporary_of, write_atomically
from quorate.storage.fencing import Holder
from quorate.storage.run_folder import RunFolder
from small_disk import small_disk


def aged(run: RunFolder, seconds: int) -> RunFolder:
    """As if it had been created so long after the others."""
    (run.path / "created").write_text(f"{datetime.fromtimestamp(1_000_000 + seconds, UTC).isoformat()}\n")
    return run


class TestCreate:
    def test_numbers_grow_and_gaps_stay(self, tmp_path: Path) -> None:
        runs = tmp_path / "deep" / "runs"
        first, second = RunFolder.create(runs, "mnist"), RunFolder.create(runs, "mnist")
        assert (first.name, second.name) == ("mnist-0001", "mnist-0002")
        (runs / "mnist-0041").mkdir()
        assert RunFolder.create(runs, "mnist").name == "mnist-0042"
        assert RunFolder.create(runs, "mnist-0001").name == "mnist-0001-0001"

    def test_has_the_folders_of_a_run(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        assert run.logs.is_dir()
        assert run.checkpoints.is_dir()
        assert run.path == tmp_path / "mnist-0001"
        files = {run.job_file, run.events_file, run.result_file, run.environment_file}
        assert {file.name for file in files} == {"job.yaml", "events.jsonl", "result.json", "environment.json"}

    def test_only_its_owner_looks_into_it_unless_it_is_shared(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path / "runs", "mnist")
        assert run.path.stat().st_mode & 0o777 == 0o700
        run.open_to_group()
        assert run.path.stat().st_mode & 0o777 == 0o750
        assert (tmp_path / "runs").stat().st_mode & 0o055, "of the folder of runs nothing was said"

    def test_launchers_at_once_never_share(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            names = list(pool.map(lambda _: RunFolder.create(tmp_path, "mnist").name, range(24)))
        assert len(set(names)) == 24

    def test_a_file_in_the_way_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("")
        with pytest.raises(RunError, match=r"runs is a file, and not a folder.*`runs`"):
            RunFolder.create(tmp_path / "runs", "mnist")

    def test_a_run_of_somebody_else_is_refused_in_words(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        closed, own = RunFolder.create(tmp_path, "mnist"), RunFolder.create(tmp_path, "mnist")
        real = os.stat

        def refuse(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            if isinstance(path, Path) and path.parent == closed.path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(path, *arguments, **options)

        monkeypatch.setattr(os, "stat", refuse)
        monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != closed.path)
        assert [run.name for run in RunFolder.all_in(tmp_path)] == [own.name]
        assert not is_search(closed.path)
        for reference in (closed.name, str(closed.path)):
            with pytest.raises(
                RunError, match=r"may not look into .*mnist-0001, which belongs to user \d+.*share: group"
            ):
                RunFolder.find(tmp_path, reference)

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
    @pytest.mark.parametrize("failing", ["mnist-0001", "logs", "checkpoints"])
    def test_a_refused_folder_is_told_and_leaves_nothing(
        self, number: int, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.mkdir

        def refuse(path: Any, *arguments: Any, **options: Any) -> None:
            if Path(path).name == failing:
                raise OSError(number, os.strerror(number), path)
            real(path, *arguments, **options)

        monkeypatch.setattr(os, "mkdir", refuse)
        kind = JobError if number == errno.ENOSPC else RunError
        with pytest.raises(kind, match=os.strerror(number)) as caught:
            RunFolder.create(tmp_path, "mnist")
        assert str(tmp_path) in str(caught.value)
        assert "`runs`" in str(caught.value)
        assert list(tmp_path.iterdir()) == []


class TestFind:
    @pytest.fixture
    def runs(self, tmp_path: Path) -> Path:
        runs = tmp_path / "runs"
        aged(RunFolder.create(runs, "mnist"), 10)
        aged(RunFolder.create(runs, "mnist"), 40)
        aged(RunFolder.create(runs, "cifar"), 30)
        (runs / "notes").mkdir()
        return runs

    @pytest.mark.parametrize(
        ("reference", "name"),
        [
            ("mnist-0001", "mnist-0001"),
            ("c", "cifar-0001"),
            ("mnist-0002", "mnist-0002"),
            ("last", "mnist-0002"),
        ],
    )
    def test_by_name_prefix_and_age(self, runs: Path, reference: str, name: str) -> None:
        assert RunFolder.find(runs, reference).path == runs / name

    def test_by_path(self, runs: Path, tmp_path: Path) -> None:
        path = runs / "mnist-0001"
        assert RunFolder.find(tmp_path / "elsewhere", str(path)).path == path

    def test_a_path_has_the_name_of_its_folder(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(runs / "mnist-0001" / "logs")
        assert RunFolder.find(runs, "..").name == "mnist-0001"

    def test_a_name_is_found_even_if_it_is_a_prefix_of_another(self, runs: Path) -> None:
        RunFolder.create(runs, "mnist-0001")
        assert RunFolder.find(runs, "mnist-0001").name == "mnist-0001"

    def test_a_folder_of_code_is_no_run(self, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "cifar").mkdir()
        monkeypatch.chdir(tmp_path)
        assert RunFolder.find(runs, "cifar").path == runs / "cifar-0001"

    def test_an_ambiguous_prefix_lists_what_it_may_be(self, runs: Path) -> None:
        with pytest.raises(RunError, match="mnist-0001, mnist-0002"):
            RunFolder.find(runs, "mnist")

    def test_an_unknown_name_lists_close_ones(self, runs: Path) -> None:
        with pytest.raises(RunError, match="did you mean cifar-0001"):
            RunFolder.find(runs, "cifra-0001")

    def test_a_name_unlike_any_lists_what_there_is(self, runs: Path) -> None:
        with pytest.raises(RunError, match="there are mnist-0002, cifar-0001, mnist-0001"):
            RunFolder.find(runs, "zzz")

    @pytest.mark.parametrize("reference", ["last", "mnist", ""])
    def test_without_runs(self, tmp_path: Path, reference: str) -> None:
        with pytest.raises(RunError, match=r"no run"):
            RunFolder.find(tmp_path / "missing", reference)

    def test_a_path_that_is_no_run(self, runs: Path) -> None:
        with pytest.raises(RunError, match="not a run folder"):
            RunFolder.find(runs, str(runs / "notes"))

    def test_runs_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("")
        with pytest.raises(RunError, match=r"cannot look for runs .*--runs FOLDER"):
            RunFolder.find(tmp_path / "runs", "last")


class TestCreation:
    def test_is_now(self, tmp_path: Path) -> None:
        created = RunFolder.create(tmp_path, "mnist").created
        assert timedelta(0) <= datetime.now(UTC) - created < timedelta(minutes=1)

    def test_survives_a_copy_that_changes_the_times_of_files(self, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        old, new = aged(RunFolder.create(runs, "mnist"), 10), aged(RunFolder.create(runs, "mnist"), 40)
        os.utime(old.path / "created")
        assert [run.name for run in RunFolder.all_in(runs)] == [old.name, new.name]

    @pytest.mark.parametrize("text", [b"", b"yesterday\n", b"\xff\xfe"])
    def test_an_edited_one_is_replaced_by_the_time_of_its_file(self, tmp_path: Path, text: bytes) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        marker = run.path / "created"
        marker.write_bytes(text)
        os.utime(marker, (1_000_000, 1_000_000))
        assert run.created == datetime.fromtimestamp(1_000_000, UTC)

    def test_one_without_a_zone_is_taken_as_utc(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        (run.path / "created").write_text("2026-05-04T03:02:01")
        assert run.created == datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)

    def test_a_run_without_it_has_the_time_of_its_folder(self, tmp_path: Path) -> None:
        (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
        (tmp_path / "mine" / "job.yaml").write_text("")
        os.utime(tmp_path / "mine", (1_000_000, 1_000_000))
        (run,) = RunFolder.all_in(tmp_path)
        assert run.created == datetime.fromtimestamp(1_000_000, UTC)

    def test_a_run_that_is_gone_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="cannot look at run mnist-0001"):
            RunFolder(tmp_path / "mnist-0001").created  # noqa: B018


class TestAllIn:
    def test_a_folder_that_is_not_there_has_none(self, tmp_path: Path) -> None:
        assert RunFolder.all_in(tmp_path / "missing") == ()

    def test_a_folder_with_a_job_file_of_its_own_is_no_run(self, tmp_path: Path) -> None:
        (tmp_path / "circles").mkdir()
        (tmp_path / "circles" / "job.yaml").write_text("lanes: 4\n")
        assert RunFolder.all_in(tmp_path) == ()
        with pytest.raises(RunError, match="circles is not a run folder: it has no file `created`"):
            RunFolder.find(tmp_path, str(tmp_path / "circles"))

    def test_a_run_that_is_removed_meanwhile_is_left_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gone, stays = RunFolder.create(tmp_path, "mnist"), RunFolder.create(tmp_path, "mnist")
        real = runs_folder.is_run

        def remove_then_look(folder: Path) -> bool:
            found = real(folder)
            if folder == gone.path:
                shutil.rmtree(folder)
            return found

        monkeypatch.setattr(run_folder, "is_run", remove_then_look)
        assert [run.name for run in RunFolder.all_in(tmp_path)] == [stays.name]

    def test_a_folder_that_may_not_be_read_is_left_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        (tmp_path / "closed").mkdir()
        real = Path.is_file

        def refuse(path: Path) -> bool:
            if path.parent.name == "closed":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return real(path)

        monkeypatch.setattr(Path, "is_file", refuse)
        assert [found.name for found in RunFolder.all_in(tmp_path)] == [run.name]


HOLD = """
import os, sys
from pathlib import Path
from quorate.storage.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    {then}
    print("held", flush=True)
    sys.stdin.read()
"""
FORK = "if os.fork() == 0: sys.stdin.read(); os._exit(0)"
EXEC = (
    "import subprocess; subprocess.Popen([sys.executable, '-c', 'input()'], close_fds=False, stderr=subprocess.DEVNULL)"
)


@contextmanager
def holder(run: RunFolder, then: str = "pass") -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock. Its children read its standard input, and so end with this block."""
    command = [sys.executable, "-c", HOLD.format(then=then), str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def can_be_locked(run: RunFolder) -> bool:
    try:
        with run.lock():
            return True
    except RunError:
        return False


class TestLock:
    def test_keeps_a_second_process_out_and_names_the_first(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        with holder(run) as process:
            with pytest.raises(RunError, match=rf"mnist-0001 is in use by process {process.pid}\b"), run.lock():
                pass
            process.kill()
            process.wait()
            with run.lock():
                pass

    @pytest.mark.parametrize("child", [FORK, EXEC], ids=["forked", "executed"])
    def test_a_child_that_outlives_its_holder_does_not_keep_it(self, tmp_path: Path, child: str) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        with holder(run, child) as process:
            process.send_signal(signal.SIGKILL)
            process.wait()
            # The child lives on; it lets go as soon as it gets to run at all after the fork.
            deadline = time.monotonic() + 60
            while not can_be_locked(run):
                assert time.monotonic() < deadline, "the child keeps the lock of its dead parent"

    def test_is_kept_when_a_forked_child_ends(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        with run.lock():
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            with pytest.raises(RunError, match=str(os.getpid())), run.lock():
                pass

    def test_can_be_taken_again_after_release(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        for _ in range(2):
            with run.lock():
                pass

    def test_errors_inside_are_not_changed(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        with pytest.raises(PermissionError, match="inside"), run.lock():
            raise PermissionError("inside")

    def test_a_run_that_is_gone_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="cannot lock run mnist-0001"), RunFolder(tmp_path / "mnist-0001").lock():
            pass


class TestHolder:
    def test_is_the_process_at_work_for_as_long_as_it_lives(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        assert run.holder() is None
        with holder(run) as process:
            assert run.holder() == Holder(process.pid)
            process.kill()
            process.wait()
            assert run.holder() is None

    def test_a_run_of_this_process_is_held_too(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        with run.lock():
            assert run.holder() == Holder(os.getpid())
        assert run.holder() is None

    def test_asking_never_keeps_a_launcher_out(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        over = threading.Event()

        def keep_asking() -> int:
            asked = 0
            while not over.is_set():
                run.holder()
                asked += 1
            return asked

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(keep_asking) for _ in range(2)]
            try:
                taken = sum(can_be_locked(run) for _ in range(500))
            finally:
                over.set()
        assert taken == 500
        assert all(each.result() > 0 for each in asking)

    def test_can_be_asked_where_nothing_may_be_written(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        with run.lock():
            run.lock_file.chmod(0o444)
            assert run.holder() == Holder(os.getpid())

    def test_without_a_readable_number_it_is_another_process(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        with run.lock():
            run.lock_file.write_text("?")
            assert run.holder() == Holder(None)
            assert str(run.holder()) == "another process"

    def test_trouble_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        run.lock_file.touch()

        def refuse(*_: Any) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        with pytest.raises(RunError, match=r"cannot look at the lock of run mnist-0001 .*Input/output error"):
            run.holder()


class TestIncarnation:
    def test_grows_by_one_and_survives(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        assert [RunFolder(run.path).next_incarnation() for _ in range(3)] == [1, 2, 3]
        assert [run.next_incarnation(above=7), run.next_incarnation(above=3), run.next_incarnation()] == [8, 9, 10]

    def test_is_on_the_disk_before_it_is_returned(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        sizes: list[int] = []
        real = os.fsync

        def watch(descriptor: int) -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                sizes.append(os.fstat(descriptor).st_size)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", watch)
        run.next_incarnation(launch="this one")
        assert sizes == [len("this one")]

    def test_the_newest_is_known_and_for_whom_it_was_taken(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        assert run.incarnations.newest() == 0
        assert not run.incarnations.is_taken_by_other("first")
        run.next_incarnation(above=9, launch="first")
        assert run.incarnations.newest() == 10
        assert not run.incarnations.is_taken_by_other("first")
        run.next_incarnation()
        assert not run.incarnations.is_taken_by_other("first"), "nobody knows for whom that one was"
        run.next_incarnation(launch="second")
        assert run.incarnations.is_taken_by_other("first")

    def test_two_that_ask_at_once_get_different_ones(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        with ThreadPoolExecutor(4) as pool:
            numbers = list(pool.map(lambda _: run.next_incarnation(), range(16)))
        assert sorted(numbers) == list(range(1, 17))

    def test_trouble_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="cannot number the coordinator"):
            RunFolder(tmp_path / "missing").next_incarnation()


class TestFiles:
    def test_the_address_is_for_its_owner_only(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        run.write_address("127.0.0.1:4000", "secret")
        assert json.loads(run.address_file.read_text()) == {"address": "127.0.0.1:4000", "token": "secret"}
        holding = [file for file in run.path.iterdir() if file.is_file() and "secret" in file.read_text()]
        assert [stat.S_IMODE(file.stat().st_mode) for file in holding] == [0o600]
        assert run.read_address() == "127.0.0.1:4000"
        run.remove_address("127.0.0.1:4001")
        assert run.address_file.exists(), "it is another one's"
        run.remove_address()
        run.remove_address()
        assert not run.address_file.exists()
        assert run.read_address() is None

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"address": 3}'])
    def test_an_edited_address_is_none(self, tmp_path: Path, text: str) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        run.address_file.write_text(text)
        assert run.read_address() is None

    def test_a_job_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        run.write_job("lanes: 4\n")
        assert run.job_file.read_text() == "lanes: 4\n"
        with pytest.raises(RunError, match=r"cannot write .*job\.yaml: No such file or directory"):
            RunFolder(tmp_path / "missing").write_job("")

    def test_result_and_environment_come_back(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        assert run.read_result() is None
        assert run.read_environment() is None
        run.write_result({"steps": 3, "final_metrics": {"loss": 0.1}})
        run.write_environment({"torch": "2"})
        assert run.read_result() == {"steps": 3, "final_metrics": {"loss": 0.1}}
        assert run.read_environment() == {"torch": "2"}

    def test_a_result_has_its_room_on_a_disk_that_is_full_by_then(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "256k") as disk:
            run = RunFolder.create(disk, "mnist")
            with run.reserving():
                with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                    while True:
                        filler.write(bytes(4096))
                with pytest.raises(JobError, match="No space left"):
                    run.write_environment({"torch": "2"})
                run.write_result({"status": "failed"})
            assert run.read_result() == {"status": "failed"}
            assert {"result.json", "created"} >= {file.name for file in run.path.iterdir() if file.is_file()} - {"lock"}

    @pytest.mark.parametrize("content", [b"{", b"[]", b"", b"\xff\xfe{", b"[" * 100_000])
    def test_an_edited_result_is_told(self, tmp_path: Path, content: bytes) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        run.result_file.write_bytes(content)
        with pytest.raises(DamagedFileError, match=r"result\.json .*quorate resume continues as if it were not there"):
            run.read_result()
        assert run.whole_result() is None

    def test_a_result_is_json_that_everybody_reads(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        run.write_result({"final_metrics": {"loss": float("nan"), "gain": 1.5}, "all": [float("inf"), -float("inf")]})
        strict = json.loads(run.result_file.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert strict == {"final_metrics": {"loss": None, "gain": 1.5}, "all": [None, None]}
        run.result_file.write_text('{"loss": NaN}')  # as earlier versions wrote it
        assert math.isnan((run.read_result() or {})["loss"])

    def test_a_result_that_may_not_be_read_is_no_damage(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        run.result_file.mkdir()
        with pytest.raises(RunError, match="Is a directory"):
            run.whole_result()

    def test_a_full_disk_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = RunFolder.create(tmp_path, "mnist")

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(JobError, match=r"cannot write .*result\.json: No space left"):
            run.write_result({})


def test_checkpoints_of_a_job_with_a_secret_are_for_its_owner_only(tmp_path: Path) -> None:
    private, public = (RunFolder.create(tmp_path, "tiny") for _ in range(2))
    private.write_job("name: tiny\n", is_private=True)
    public.write_job("name: tiny\n")
    assert stat.S_IMODE(private.checkpoints.stat().st_mode) == 0o700
    assert stat.S_IMODE(public.checkpoints.stat().st_mode) & 0o055


def killed_while_writing(write: Callable[[], None]) -> None:
    """In a process of its own, right before what it has written gets its name."""
    pid = os.fork()
    if pid == 0:
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


class TestSweep:
    def test_what_a_killed_writer_leaves_is_gone_when_a_launcher_begins_and_when_it_ends(self, tmp_path: Path) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        tracked = run.path / "track" / "mlflow.offset"
        tracked.parent.mkdir()

        def left() -> list[str]:
            return sorted(path.name.split(".partial")[0].rsplit(".", 1)[0] for path in run.path.rglob(".*.partial"))

        killed_while_writing(lambda: run.write_address("127.0.0.1:4000", "token"))
        killed_while_writing(lambda: write_atomically(tracked, "0"))
        assert left() == [".coordinator.json", ".mlflow.offset"]
        with run.lock():
            assert left() == []
            killed_while_writing(lambda: run.write_address("127.0.0.1:4000", "token"))
            assert left() == [".coordinator.json"]
        assert left() == []

    def test_what_is_being_written_stays_and_what_nobody_knows_the_writer_of_goes_with_age(
        self, tmp_path: Path
    ) -> None:
        run = RunFolder.create(tmp_path, "mnist")
        ours = temporary_of(run.result_file)
        elsewhere = run.path / f".result.json.0123-{os.getpid()}-89ab.partial"
        nameless, old, other = (run.path / name for name in (".job.yaml.01ab.partial", ".a.02cd.partial", "b.partial"))
        for path in (ours, elsewhere, nameless, old, other):
            path.write_text("half")
        os.utime(old, (1, 1))
        os.utime(other, (1, 1))
        with run.lock():
            pass
        assert [path.exists() for path in (ours, elsewhere, nameless, old, other)] == [True, True, True, False, True]
