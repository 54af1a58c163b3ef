import gc
import os
import posix
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

import warm
from options import is_of_the_core, options_of
from quorate.core.masking import forget_secrets, known_secrets

TESTS = Path(__file__).parent

# Before torch is imported anywhere: tests fork workers, and a fork after an operation on two threads hangs.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
for name in [name for name in os.environ if name.startswith("QUORATE_")]:
    del os.environ[name]

# Under nohup it is ignored, here and in every command that a test starts; a test of a closed terminal needs it. So is
# Ctrl-C in the background of a script.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# What earlier tests have left to be collected may wait, when it is, for threads that a forked process does not have.
os.register_at_fork(after_in_child=gc.freeze)
os.register_at_fork(after_in_child=warm.forget_what_was_measured)

warm.install()

# Half a million objects come with the tests and stay: see below.
gc.disable()

# How long an example takes says how busy the machine is. The long tests look at more of them.
hypothesis.settings.register_profile("quorate", deadline=None, max_examples=40)
hypothesis.settings.register_profile("long", deadline=None, max_examples=200)
hypothesis.settings.load_profile("quorate")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-namespaces",
        action="store_true",
        help="as root, fail where network namespaces cannot be made, instead of skipping (so too with CI set)",
    )
    parser.addoption("--core", action="store_true", help="leave out the tests of options: see tests/options.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --core a file of an option's tests is not even imported: the option may not be there."""
    is_file = config.getoption("--core") and collection_path.suffix == ".py"
    return True if is_file and not is_of_the_core(collection_path.relative_to(TESTS).as_posix()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is about an option, before `-m` looks at marks; with --core leave it out."""
    core: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.removeprefix("tests/")
        for option in options_of(test):
            item.add_marker(pytest.mark.option(option))
        (core if is_of_the_core(test) else others).append(item)
    if config.getoption("--core") and others:
        config.hook.pytest_deselected(items=others)
        items[:] = core


def pytest_collection_finish() -> None:
    """What has come with the tests is not looked through for garbage again and again, here and in what is forked.

    Nor is anything compiled kept from now on: of a task that is written twice within a second, the first would run.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Innermost, so that it is done before pytest-cov combines what was measured."""
    result = yield
    if session.config.pluginmanager.hasplugin("_cov") and "PYTEST_XDIST_WORKER" not in os.environ:
        warm.drop_damaged_measurements(session.config.rootpath)
    return result


@pytest.fixture(scope="session", autouse=True)
def temporary_files() -> Iterator[None]:
    """What a process that was killed, or a task, has left among the temporary files goes when the tests are over."""
    folder = tempfile.mkdtemp()  # no deeper than usual: messages with paths are folded
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def child_signals() -> Iterator[None]:
    """A DataLoader of torch's that is tried in this process listens to the deaths of children from then on."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture(scope="session")
def namespaces_allowed(request: pytest.FixtureRequest) -> None:
    """For tests that need network namespaces: skipped where none can be made, unless that must not be."""
    from bad_networks import why_impossible

    reason = why_impossible()
    if reason is None:
        return
    if os.geteuid() == 0 and (request.config.getoption("--require-namespaces") or os.environ.get("CI")):
        pytest.fail(f"as root there must be network namespaces: {reason}")
    pytest.skip(reason)


@pytest.fixture
def unmeasured(no_cover: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that run lines of ours which others run too: measuring doubles what their many processes cost."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # of commands
    monkeypatch.setattr(os, "_exit", posix._exit)  # of forked workers: coverage's own writes all that was measured


@pytest.fixture
def cold() -> Iterator[None]:
    """For tests of how an interpreter starts: every one is a new one."""
    with warm.cold():
        yield


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests() -> Iterator[None]:
    """What a job of one test keeps secret is plain text in the next."""
    before = set(known_secrets())
    yield
    forget_secrets(set(known_secrets()) - before)
