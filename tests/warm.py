"""Interpreters that are warm: `python -m quorate ...` forked from a process that has imported torch already.

Importing it is most of what a small job costs, and a test run starts hundreds. What is forked is a process of its own
in every other way: its own environment, folder, descriptors, session, command line and parent, and the same hash seed
as a fork server. Whatever asks for another kind of interpreter, and every test with the fixture `cold`, gets a new one;
so does the job to whose digest all others are compared.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import posix
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import setproctitle

COMMAND = "quorate"
PART = "quorate.api"
KERNEL = "ipykernel_launcher"
SCRIPT = "a script"
TRIALS = "quorate.tune.local_search"
PROGRAMS = (COMMAND, PART, KERNEL, SCRIPT, TRIALS, "quorate.engines.fork_server", "quorate.coordinator")
# A fork server and a coordinator, and what takes the place of one that is killed.
SPARES = {
    "train": 3,
    "resume": 3,
    "eval": 2,
    "predict": 2,
    "find-lr": 3,
    "chaos": 5,
    "diff": 8,
    "certify": 5,
    "replay": 2,
    PART: 3,
    KERNEL: 4,
    SCRIPT: 4,
    "tune": 2,
    TRIALS: 2,
}
MEASURING = "COVERAGE_PROCESS_CONFIG"
SIGNALS_OF_A_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOT_PRELOADED = (
    *("__main__", "quorate.engines.fork_server", TRIALS, "_pb2", "quorate.tracking."),
    *(".ray_", "engines.ray.connection", "engines.ray.train"),  # which import Ray, an extra
)
# What an interpreter or a library looks at once, when it starts.
LOOKED_AT_ONCE = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "MIMALLOC_",
    "TORCH",
    "FORCE_COLOR",
)
_MESSAGE = 1 << 18
_MOST_DESCRIPTORS = 64
_ROOM = 2000
_PR_SET_CHILD_SUBREAPER = 36

PYTHON = sys.executable  # whatever a test takes for it later
ForkExec = Callable[..., int]
start_anew: ForkExec = subprocess._fork_exec  # type: ignore[attr-defined]
_prctl = ctypes.CDLL(None).prctl


class Request:
    """What `subprocess` is about to start, taken from the arguments of its innermost function."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        # fmt: off
        (arguments, _, close_fds, keep, cwd, environment, stdin, _, _, stdout, _, stderr, _, status_pipe, _,
         new_session, group, gid, gids, uid, umask, preexec, _) = given
        # fmt: on
        self.arguments = [os.fsdecode(word) for word in arguments]
        self.environment = (
            dict(os.environ)
            if environment is None
            else dict(os.fsdecode(pair).partition("=")[::2] for pair in environment)
        )
        # Not what is written: the folder of this process may be gone.
        self.folder = str(Path("/proc/self/cwd").readlink()) if cwd is None else os.fsdecode(cwd)
        self.new_session = bool(new_session)
        self.descriptors = {target: target for target in keep if target != status_pipe}
        for target, source in enumerate((stdin, stdout, stderr)):
            self.descriptors[target] = target if source == -1 else source
        self._is_plain = bool(close_fds) and preexec is None and group == -1 and umask == -1
        self._is_plain &= gid is None and gids is None and uid is None and Path(self.folder).is_dir()

    @property
    def program(self) -> str:
        """What is to run: a module of ours, or a script; nothing if something else is asked of the interpreter."""
        python, *words = self.arguments
        if python != PYTHON or not words:
            return ""
        if words[0].endswith(".py"):
            return SCRIPT
        words = words[1:] if words[0] == "-P" else words
        return words[1] if words[0] == "-m" and words[1] in PROGRAMS else ""

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether an interpreter that was started with this environment will do."""
        if not self._is_plain or not self.program:
            return False
        looked_at = {name: value for name, value in self.environment.items() if name.startswith(LOOKED_AT_ONCE)}
        path = "PYTHONPATH"
        return self.environment.get(path) == environment.get(path) and all(
            environment.get(name) == value for name, value in looked_at.items()
        )

    def send(self, connection: socket.socket) -> None:
        """To a process that will be it."""
        document = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        targets = list(self.descriptors)
        document |= {"descriptors": targets, "program": self.program}
        socket.send_fds(connection, [json.dumps(document).encode()], [self.descriptors[target] for target in targets])


class Warmth:
    """Stands in for the innermost function of `subprocess`."""

    def __init__(self) -> None:
        # Kept, since the first test that needs a process may be one whose processes are not measured.
        self._measuring = {name: value for name, value in os.environ.items() if name == MEASURING}
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._connection: socket.socket | None = None
        self._environment: dict[str, str] = {}

    def __call__(self, *given: Any) -> int:
        """Start a process; its pid."""
        if os.getpid() == self._owner:
            request = Request(given)
            if request.program:
                with self._turn:
                    if self._connection is None:
                        self._start()
                    if request.fits(self._environment):
                        return self._ask(request)
        return start_anew(*given)

    def _start(self) -> None:
        from quorate.engines.local import ALLOCATOR, ENVIRONMENT

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = ALLOCATOR | os.environ | self._measuring | ENVIRONMENT
        with theirs:
            room = " " * _ROOM  # for the command lines of what it forks
            self._process = subprocess.Popen(
                [PYTHON, "-P", __file__, str(theirs.fileno()), room],
                cwd="/",
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        atexit.register(self._stop)

    def _stop(self) -> None:
        assert self._connection is not None
        self._connection.close()
        if os.getpid() == self._owner:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: Request) -> int:
        assert self._connection is not None
        # An orphan is ours only for the moment in which it is made one.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            request.send(self._connection)
            answer = self._connection.recv(_MESSAGE)
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the process that forks warm interpreters has ended"
        return int(answer)


class Spares:
    """What a forked command starts: taken from processes that it was born with, while there are any."""

    def __init__(self, environment: dict[str, str], count: int) -> None:
        self._environment = environment
        self._spares = [_fork_spare(environment) for _ in range(count)]
        self._owner = os.getpid()

    def __call__(self, *given: Any) -> int:
        """Start a process; its pid."""
        if self._spares and os.getpid() == self._owner:
            request = Request(given)
            if request.fits(self._environment):
                pid, connection = self._spares.pop()
                with connection:
                    request.send(connection)
                    connection.recv(_MESSAGE)
                return pid
        return start_anew(*given)


def _fork_spare(environment: dict[str, str]) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_A_TERMINAL)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_spare(theirs, environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_OF_A_TERMINAL)
    theirs.close()
    return pid, ours


def _be_spare(connection: socket.socket, environment: dict[str, str]) -> NoReturn:
    os.chdir("/")
    received = _receive(connection)
    if received is None:
        os._exit(0)  # it was not needed
    # What came before this was a process of its own was meant for the command, and is forgotten.
    for number in SIGNALS_OF_A_TERMINAL:
        signal.signal(number, signal.signal(number, signal.SIG_IGN))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_OF_A_TERMINAL)
    _become(*received, environment, connection)


def serve(connection: socket.socket) -> None:
    """Fork what is asked for, until whoever asks is gone."""
    environment = dict(os.environ)
    with patch.dict(os.environ, SPT_NOENV="1"):
        setproctitle.getproctitle()  # it looks for the words of the command line now, while they are in their place
    _preload_measured() if MEASURING in os.environ else _preload()
    gc.collect()
    gc.freeze()
    while (received := _receive(connection)) is not None:
        document, descriptors = received
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            _become(document, descriptors, environment, connection)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, _MOST_DESCRIPTORS)
    except ConnectionError:
        return None
    return (json.loads(message), list(descriptors)) if message else None


def forget_what_was_measured() -> None:
    """In a process that was forked, which would write down all that was measured before it, and look for all files.

    There are thousands, and it takes a tenth of a second in each.
    """
    if "coverage" not in sys.modules:
        return
    import coverage

    measurement = coverage.Coverage.current()
    if measurement is not None and measurement._collector is not None and measurement._inorout is not None:
        measurement._collector._clear_data()
        measurement._inorout.source_pkgs = []


def measure_no_more() -> None:
    """In a forked process that runs the same lines as another."""
    if "coverage" in sys.modules:
        import coverage

        measurement = coverage.Coverage.current()
        if measurement is not None:
            measurement.stop()
    os._exit = posix._exit


def drop_damaged_measurements(folder: Path) -> None:
    """Remove what a process has left that was killed while it wrote it, as many are in tests of faults: nothing can be
    read from it, and coverage would warn of each when it combines them."""
    from coverage import CoverageData
    from coverage.exceptions import CoverageException

    for path in folder.glob(".coverage.*"):
        if path.name.endswith("-journal"):
            continue
        data = CoverageData(str(path), read_only=True)
        try:
            data.read()
        except CoverageException:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
        finally:
            data.close(force=True)


def _preload_measured() -> None:
    """Which is the only time that most lines outside of functions run; what is forked is measured anew."""
    import coverage

    _preload()
    measurement = coverage.process_startup.coverage  # type: ignore[attr-defined] # begun with the interpreter
    del coverage.process_startup.coverage  # type: ignore[attr-defined]
    measurement.stop()
    measurement.save()
    atexit.unregister(measurement._atexit)
    os._exit = posix._exit


def _preload() -> None:
    import torch._dynamo

    import quorate

    assert torch.get_num_threads() == 1
    for module in pkgutil.walk_packages(quorate.__path__, "quorate."):
        if any(part in module.name for part in NOT_PRELOADED):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # Of an option that was taken away, to see that the core does without it.
            if error.name is None or not error.name.startswith("quorate."):
                raise
    assert threading.active_count() == 1


def _become(
    document: dict[str, Any], descriptors: list[int], warm: dict[str, str], connection: socket.socket
) -> NoReturn:
    """Be the process that was asked for."""
    arguments: list[str] = document["arguments"]
    os.chdir(document["folder"])
    _show_command_line(arguments)
    if document["new_session"]:
        os.setsid()
    connection.send(str(os.getpid()).encode())  # only now: who asked may look at it, or kill its group, at once
    _take_descriptors(dict(zip(document["descriptors"], descriptors, strict=True)))
    os.environ.clear()
    os.environ.update(document["environment"])
    tempfile.tempdir = None
    _, first, *rest = arguments
    program = document["program"]
    if program == SCRIPT:
        sys.path.insert(0, str(Path(first).parent.absolute()))
        run, sys.argv = functools.partial(runpy.run_path, first), [first, *rest]
    else:
        if program == KERNEL:
            sys.path.insert(0, "")  # as IPython does, unless the interpreter keeps off its folder, as this one does
        if first == "-P":
            rest = rest[1:]
        else:
            sys.path.insert(0, document["folder"])
        run, sys.argv = functools.partial(runpy.run_module, program, alter_sys=True), rest
        # A new interpreter would not have imported it yet.
        warnings.filterwarnings("ignore", "'quorate.* found in sys.modules", RuntimeWarning, "runpy")
    sys.orig_argv = arguments
    needed = SPARES.get(rest[1] if program == COMMAND and rest[1:] else program, 0)
    subprocess._fork_exec = Spares(warm, needed)  # type: ignore[attr-defined]
    if MEASURING in os.environ:
        import coverage

        coverage.process_startup()
        forget_what_was_measured()
        os.register_at_fork(after_in_child=forget_what_was_measured)
    _end(_run(run))


def _take_descriptors(sources: dict[int, int]) -> None:
    """Have these and no others, at these numbers."""
    import fcntl

    beyond = max(sources) + 1
    held = {target: fcntl.fcntl(source, fcntl.F_DUPFD, beyond) for target, source in sources.items()}
    for target, source in held.items():
        os.dup2(source, target)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (the one that it is read through is gone afterwards)
        if int(name) not in sources:
            with contextlib.suppress(OSError):
                os.close(int(name))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )


def _show_command_line(arguments: list[str]) -> None:
    """To those who look for a process by its words."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    words = b"\0".join(map(os.fsencode, arguments))[: end - begin - 1]
    ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


def _run(program: Callable[..., Any]) -> int:
    try:
        program(run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """As an interpreter ends, but without taking torch apart, module by module."""
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


@functools.cache
def install() -> None:
    """From now on, in this process."""
    subprocess._fork_exec = Warmth()  # type: ignore[attr-defined]


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """As long as this lasts, every interpreter is a new one, as a user's is."""
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = start_anew  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
