"""Which mistakes in the decisions do tests and simulation show? ``python -m simulation.mutation --jobs 16``.

Everything is imported once, and the tests are collected. Each mutant is a process forked from there: one function has
the code with the mistake, and what reaches that line unmutated (tests and simulated jobs, the fastest first) is run
until something fails, hangs, or the time is over. Who survives is told; those of whom a reason is known why nothing can
tell them apart stand in survivors.toml. Now and then one is not mutated at all: it must survive.
"""

import argparse
import contextlib
import json
import os
import pickle
import random
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

import pytest

import quorate
from simulation.mutations import Mutation, code_with, mutations_of

SOURCE = Path(quorate.__file__).resolve().parent
TESTS = Path(__file__).resolve().parent.parent
LISTED = Path(__file__).with_name("survivors.toml")

# Where decisions are: all files of a package but those that only carry them out, and single files.
PACKAGES = {
    "coordinator": ("__init__", "__main__", "client", "event_log", "service"),
    "worker": (
        *(
            "__init__",
            "__main__",
            "assembly",
            "assignment",
            "coordinator_link",
            "outbox",
            "process",
            "restore",
            "trouble",
        ),
        "status",
    ),
}
FILES = ("training/save_decisions.py", "checkpoint/retention.py", "checkpoint/selection.py")

# What shows a mistake in a package: these tests, but for those that start processes; and simulated jobs.
COLLECTED = {
    "coordinator": ("coordinator", "simulation/test_simulated_parts.py"),
    "worker": ("worker",),
    "training": ("training/test_save_decisions.py", "training/test_checkpointer.py"),
    "checkpoint": tuple(f"checkpoint/test_{what}.py" for what in ("retention", "selection", "best_evaluation")),
}
LEFT_OUT = (
    *("coordinator/test_coordinator_process.py", "coordinator/test_proto_stubs.py"),
    "worker/test_trouble_in_user_code.py",
)
# They wait for real time, on real sockets: the last to be asked.
IN_REAL_TIME = ("test_membership.py", "test_coordinator_service.py", "test_coordinator_link.py", "test_last_events.py")
TELLING_SEEDS = (58, 115, 215, 49)
"""Seeds that have shown what is rarely shown."""

LIMIT = 20.0
SLOWEST = 5.0
PATIENCE = 3.0
"""Seconds that a test may always take before it hangs; else ten times what it takes unmutated."""
MEMORY = 6 << 30
CONTROL_EVERY = 50
WRITE_EVERY = 5.0

KILLED, HANGS, SURVIVED, UNREACHED, UNBUILT = "killed", "hangs", "survived", "unreached", "unbuilt"
EQUIVALENT = "equivalent"

Line = tuple[str, int]


@dataclass(frozen=True)
class Killer:
    """Something that can show a mistake: `run` says how, or nothing."""

    name: str
    run: Callable[[], str]
    is_simulated: bool = False


@dataclass(frozen=True)
class Measured:
    """What a killer does without a mistake: how long, and which lines of decisions it reaches."""

    seconds: float
    lines: frozenset[Line]
    failed: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    outcome: str
    killer: str = ""
    how: str = ""
    seconds: float = 0.0
    is_simulated: bool = False


@dataclass
class Job:
    """A mutant that is to be tried, or a control without a mistake."""

    mutation: Mutation
    plan: list[Killer]
    is_control: bool = False


@dataclass
class Trial:
    """A job under way, in a process of its own."""

    job: Job
    pid: int
    pipe: int
    began: float
    current: Killer | None = None
    current_over: float = 0.0
    told: bytes = b""


# --- the command


def main() -> int:
    """Try the mutants; 1 if one survives that is not listed, or one that is listed does not exist."""
    options = _options()
    mutations = all_mutations()
    if not _choose(mutations, options):
        print("there is no such mutant; `--list` names all")
        return 2
    if options.list:
        for one in mutations:
            print(f"{one.file.relative_to(SOURCE)}:{one.line}  {one.name}")
        print(f"{len(mutations)} mutants")
        return 0
    folder = tempfile.mkdtemp(prefix="quorate-mutation-")
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    campaign = Campaign(options, mutations, Path(folder))
    packages = {one.file.parent.name for one in campaign.chosen}
    paths = [str(TESTS / path) for package in sorted(packages) for path in COLLECTED[package]]
    paths += [f"--ignore={TESTS / path}" for path in LEFT_OUT]
    switches = ["-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-n0", "--timeout=0"]
    wanted = ["-m", "not long and not faults", "--hypothesis-profile=mutation", f"--rootdir={TESTS.parent}"]
    try:
        pytest.main([*paths, *switches, *wanted], plugins=[campaign])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return campaign.status


def all_mutations() -> list[Mutation]:
    """Every mutant of every decision, in the order of the files."""
    return [one for file in decision_files() for one in mutations_of(file, file.parent.name)]


def decision_files() -> list[Path]:
    """The files with decisions."""
    files = [SOURCE / name for name in FILES]
    for package, left_out in PACKAGES.items():
        files += [file for file in (SOURCE / package).glob("*.py") if file.stem not in left_out]
    if missing := [str(file) for file in files if not file.exists()]:
        raise FileNotFoundError(f"no such file of decisions: {', '.join(missing)}; see FILES in {__file__}")
    return sorted(files)


def listed_survivors() -> dict[str, str]:
    """Mutants that nothing can show, and why."""
    return {one["mutant"]: one["reason"] for one in tomllib.loads(LISTED.read_text()).get("survivor", [])}


class Campaign:
    """A plugin of pytest: where it would run the tests that it has collected, mutants are tried."""

    def __init__(self, options: argparse.Namespace, mutations: list[Mutation], folder: Path) -> None:
        self.status = 2
        self._options = options
        self._all = mutations
        self.chosen = _choose(mutations, options)
        self._folder = folder
        self._session: pytest.Session | None = None
        self._failed = ""
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        self._measured: dict[str, Measured] = {}
        self._reached_by: dict[str, int] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._broken_controls: list[str] = []
        self._began = time.monotonic()
        self._written = 0.0

    # --- as a plugin

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Before hypothesis is, which is asked for this profile."""
        import hypothesis

        # What fails is not made smaller and not kept: that it fails is enough.
        hypothesis.settings.register_profile(
            "mutation",
            deadline=None,
            database=None,
            derandomize=True,
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of the tests."""
        self._session = session
        self._functions = _functions_in({str(file) for file in decision_files()})
        killers = [
            *(self._tests(session) if self._options.by != "simulation" else ()),
            *(self._simulations() if self._options.by != "tests" else ()),
        ]
        self._measure(killers)
        jobs = self._jobs(killers)
        for job in (one for one in jobs if not one.plan):
            self._outcomes[job.mutation.name] = Outcome(UNREACHED)
        self._try([job for job in jobs if job.plan])
        self.status = self._report()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How a test has ended, in a process that tries a mutant."""
        if report.failed:
            self._failed = str(getattr(report.longrepr, "reprcrash", "") or report.longrepr)[-300:]

    # --- who shows mistakes

    def _tests(self, session: pytest.Session) -> list[Killer]:
        def killer_of(item: pytest.Item) -> Killer:
            def run() -> str:
                self._failed = ""
                # As if something followed: what is made once for all tests stays.
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=session)
                return self._failed

            return Killer(item.nodeid, run)

        return [killer_of(item) for item in session.items]

    def _simulations(self) -> list[Killer]:
        from simulation.hand_written import SCHEDULES, SEEDS
        from simulation.simulation import Simulation

        def killer_of(name: str, seed: int, **given: Any) -> Killer:
            return Killer(name, lambda: Simulation(seed, **given).run().broken or "", is_simulated=True)

        seeds = dict.fromkeys((*TELLING_SEEDS, *range(self._options.seeds)))
        by_hand = [
            killer_of(f"schedule '{name}', seed {seed}", seed, given=one)
            for name, one in SCHEDULES.items()
            for seed in SEEDS
        ]
        return [*by_hand, *(killer_of(f"seed {seed}", seed) for seed in seeds)]

    def _measure(self, killers: Sequence[Killer]) -> None:
        """Run all of them without a mistake, and see which lines they reach."""
        jobs = self._options.jobs
        parts = [killers[number::jobs] for number in range(jobs)]
        files = [self._folder / f"measured-{number}" for number in range(jobs)]
        children = [_fork(partial(_measure, part, file)) for part, file in zip(parts, files, strict=True)]
        for child in children:
            os.waitpid(child, 0)
        for file in files:
            self._measured |= pickle.loads(file.read_bytes())
        failed = {name: one.failed for name, one in self._measured.items() if one.failed}
        for name, how in failed.items():
            print(f"left out, since it fails without a mistake: {name}: {how}", flush=True)
        print(
            f"{len(killers)} tests and simulated jobs reach"
            f" {len({line for one in self._measured.values() for line in one.lines})} lines of decisions;"
            f" {time.monotonic() - self._began:.0f} s",
            flush=True,
        )

    def _jobs(self, killers: Sequence[Killer]) -> list[Job]:
        """The mutants, each with those who reach its line."""
        usable = [
            killer
            for killer in killers
            if not self._measured[killer.name].failed and self._measured[killer.name].seconds < SLOWEST
        ]
        usable.sort(key=lambda killer: (_is_in_real_time(killer), self._measured[killer.name].seconds))
        reaching: dict[Line, list[int]] = {}
        for number, killer in enumerate(usable):
            for line in self._measured[killer.name].lines:
                reaching.setdefault(line, []).append(number)
        jobs = []
        for one in self.chosen:
            numbers = {number for line in one.lines for number in reaching.get((str(one.file), line), ())}
            plan = [usable[number] for number in sorted(numbers)]
            self._reached_by[one.name] = len(plan)
            jobs.append(Job(one, plan))
            if len(jobs) % CONTROL_EVERY == 0 and plan:
                jobs.append(Job(one, plan, is_control=True))
        return jobs

    # --- trying

    def _try(self, jobs: Sequence[Job]) -> None:
        waiting = iter(jobs)
        under_way: dict[int, Trial] = {}
        done = 0
        with selectors.DefaultSelector() as selector:
            try:
                while True:
                    while len(under_way) < self._options.jobs and (job := next(waiting, None)) is not None:
                        trial = self._begin(job)
                        under_way[trial.pipe] = trial
                        selector.register(trial.pipe, selectors.EVENT_READ)
                    if not under_way:
                        break
                    ready = {key.fd for key, _ in selector.select(0.05)}
                    for trial in list(under_way.values()):
                        outcome = self._look_at(trial, trial.pipe in ready)
                        if outcome is None:
                            continue
                        selector.unregister(trial.pipe)
                        del under_way[trial.pipe]
                        _end(trial)
                        done += 1
                        self._note(trial.job, outcome, done, len(jobs))
            finally:
                for trial in under_way.values():
                    _end(trial)

    def _begin(self, job: Job) -> Trial:
        reading, writing = os.pipe()

        def work() -> None:
            os.close(reading)
            self._run_mutant(job, writing)

        child = _fork(work)
        os.close(writing)
        os.set_blocking(reading, False)
        return Trial(job, child, reading, time.monotonic())

    def _run_mutant(self, job: Job, pipe: int) -> None:
        if not job.is_control:
            try:
                self._build(job.mutation)
            except ValueError as error:
                os.write(pipe, f"{UNBUILT}\t{error}\n".encode())
                return
        for number, killer in enumerate(job.plan):
            os.write(pipe, f"begins\t{number}\n".encode())
            if how := _run(killer):
                os.write(pipe, f"{KILLED}\t{' '.join(how.split())}\n".encode())
                return
        os.write(pipe, f"{SURVIVED}\t\n".encode())

    def _build(self, mutation: Mutation) -> None:
        code = code_with(mutation)
        for function in self._functions.get(_place(code), []):
            function.__code__ = code

    def _look_at(self, trial: Trial, is_ready: bool) -> Outcome | None:
        """What has become of it, if anything has."""
        now = time.monotonic()
        seconds = round(now - trial.began, 2)
        is_over = False
        if is_ready:
            piece = os.read(trial.pipe, 1 << 16)
            is_over = not piece
            *lines, trial.told = (trial.told + piece).split(b"\n")
            for line in lines:
                word, _, rest = line.decode(errors="replace").partition("\t")
                if word == "begins":
                    trial.current = trial.job.plan[int(rest)]
                    usual = self._measured[trial.current.name].seconds
                    trial.current_over = now + max(PATIENCE, 10 * usual)
                else:
                    return _outcome(trial, word, rest, seconds)
        if is_over:
            return _outcome(trial, KILLED, "the process died", seconds)
        if trial.current is not None and now > trial.current_over:
            return _outcome(trial, HANGS, "", seconds)
        if now - trial.began > self._options.limit:
            return _outcome(trial, SURVIVED, "the time was over", seconds)
        return None

    def _note(self, job: Job, outcome: Outcome, done: int, total: int) -> None:
        if job.is_control:
            if outcome.outcome != SURVIVED:
                self._broken_controls.append(f"{outcome.killer}: {outcome.how or outcome.outcome}")
                print(f"fails without a mistake: {self._broken_controls[-1]}", flush=True)
        else:
            self._outcomes[job.mutation.name] = outcome
            if outcome.outcome == SURVIVED:
                print(f"survives: {_where(job.mutation)}  {job.mutation.name}", flush=True)
        now = time.monotonic()
        if now - self._written > WRITE_EVERY or done == total:
            self._written = now
            counts = Counter(one.outcome for one in self._outcomes.values())
            told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
            print(f"{done}/{total} in {now - self._began:.0f} s: {told}", flush=True)
            self._write()

    # --- reporting

    def _write(self) -> None:
        if self._options.json is None:
            return
        text = json.dumps(self._document(), indent=1, ensure_ascii=False)
        unfinished = self._options.json.with_name(self._options.json.name + ".partial")
        unfinished.write_text(text)
        unfinished.replace(self._options.json)

    def _document(self) -> dict[str, Any]:
        listed = listed_survivors()
        tried = [one for one in self.chosen if one.name in self._outcomes]
        return self._counts() | {
            "mutants": [
                {
                    "mutant": one.name,
                    "file": str(one.file.relative_to(SOURCE)),
                    "line": one.line,
                    "listed": listed.get(one.name),
                    "reached_by": self._reached_by.get(one.name, 0),
                    **vars(self._outcomes[one.name]),
                }
                for one in tried
            ],
        }

    def _counts(self) -> dict[str, Any]:
        listed = listed_survivors()
        by_outcome = Counter(one.outcome for one in self._outcomes.values())
        shown = [one for one in self._outcomes.values() if one.outcome in (KILLED, HANGS)]
        equivalent = [name for name in self._survivors() if listed.get(name, "").startswith(EQUIVALENT)]
        counted = len(self._outcomes) - by_outcome[UNBUILT] - len(equivalent)
        return {
            "mutants_in_all": len(self._all),
            "chosen": len(self.chosen),
            "tried": len(self._outcomes),
            "killed_by_tests": sum(not one.is_simulated for one in shown),
            "killed_by_simulation": sum(one.is_simulated for one in shown),
            "of_these_by_hanging": by_outcome[HANGS],
            "survived": len(self._survivors()),
            "of_these_equivalent": len(equivalent),
            "unbuilt": by_outcome[UNBUILT],
            "killed_percent": round(100 * len(shown) / counted, 2) if counted else 100.0,
            "seconds": round(time.monotonic() - self._began, 1),
            "broken_controls": self._broken_controls,
        }

    def _survivors(self) -> list[str]:
        return [name for name, one in self._outcomes.items() if one.outcome in (SURVIVED, UNREACHED)]

    def _report(self) -> int:
        self._write()
        listed, by_name = listed_survivors(), {one.name: one for one in self._all}
        survivors = self._survivors()
        unlisted = [name for name in survivors if name not in listed]
        gone = [name for name in listed if name not in by_name]
        for name in (name for name in survivors if name in listed):
            print(f"survives, as listed: {_where(by_name[name])}  {name}\n    {listed[name]}")
        for name in unlisted:
            what = "" if self._outcomes[name].outcome == SURVIVED else " (nothing reaches it)"
            print(f"SURVIVES{what}: {_where(by_name[name])}  {name}")
        for name in gone:
            print(f"LISTED, but there is no such mutant: {name}")
        for name in (name for name in listed if self._is_killed(name)):
            print(f"listed, but killed by {self._outcomes[name].killer}: {name}")
        for told in self._broken_controls:
            print(f"FAILS WITHOUT A MISTAKE: {told}")
        for key, value in self._counts().items():
            print(f"{key}: {value}")
        return int(bool(unlisted or gone or self._broken_controls))

    def _is_killed(self, name: str) -> bool:
        return name in self._outcomes and self._outcomes[name].outcome in (KILLED, HANGS)


# --- parts


def _choose(mutations: Sequence[Mutation], options: argparse.Namespace) -> list[Mutation]:
    chosen = [one for one in mutations if options.only in f"{one.file.relative_to(SOURCE)} {one.name}"]
    if options.without_listed:
        listed = listed_survivors()
        chosen = [one for one in chosen if one.name not in listed]
    if options.names is not None:
        names = set(options.names.read_text().splitlines())
        chosen = [one for one in chosen if one.name in names]
    part, parts = (int(number) for number in options.shard.split("/"))
    chosen = chosen[part - 1 :: parts]
    chance = random.Random(options.seed)
    if options.sample is not None and options.sample < len(chosen):
        chosen = sorted(chance.sample(chosen, options.sample), key=lambda one: (one.file, one.line))
    # Those of one function take about as long: in turn, so that the last do not run alone.
    chance.shuffle(chosen)
    return chosen


def _functions_in(files: set[str]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Every function of these files that exists, by where it stands."""
    import gc

    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename in files:
            found.setdefault(_place(one.__code__), []).append(one)
    return found


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _fork(work: Callable[[], None]) -> int:
    """Do it in a process of its own session, which says nothing and may not take all memory."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _work_alone(work)
    return child


def _work_alone(work: Callable[[], None]) -> NoReturn:
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        work()
    finally:
        os._exit(0)


def _run(killer: Killer) -> str:
    """How it shows a mistake, if it does."""
    try:
        return killer.run()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _measure(killers: Iterable[Killer], file: Path) -> None:
    watched = {str(one) for one in decision_files()}
    measured = {}
    for killer in killers:
        lines: set[Line] = set()
        began = time.perf_counter()
        with _noting(watched, lines):
            failed = _run(killer)
        measured[killer.name] = Measured(time.perf_counter() - began, frozenset(lines), failed)
    file.write_bytes(pickle.dumps(measured))


@contextlib.contextmanager
def _noting(files: set[str], lines: set[Line]) -> Iterator[None]:
    """Note which lines of these files are run meanwhile, in whatever thread."""

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        return on_line if frame.f_code.co_filename in files else None

    def on_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    threading.settrace(on_call)
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)


def _outcome(trial: Trial, outcome: str, how: str, seconds: float) -> Outcome:
    if outcome in (SURVIVED, UNBUILT) or trial.current is None:
        return Outcome(outcome, "", how, seconds)
    return Outcome(outcome, trial.current.name, how, seconds, trial.current.is_simulated)


def _end(trial: Trial) -> None:
    """Nothing of it stays behind, nor of what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(trial.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(trial.pid, signal.SIGKILL)
    os.waitpid(trial.pid, 0)
    os.close(trial.pipe)


def _is_in_real_time(killer: Killer) -> bool:
    return any(name in killer.name for name in IN_REAL_TIME)


def _where(mutation: Mutation) -> str:
    return f"{mutation.file.relative_to(SOURCE)}:{mutation.line}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulation.mutation", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at the same time")
    parser.add_argument("--json", type=Path, help="write the outcomes there, from time to time and at the end")
    parser.add_argument("--only", default="", help="those with this text in their file or name")
    parser.add_argument("--names", type=Path, help="those whose names are the lines of this file")
    parser.add_argument("--sample", type=int, help="only so many of them")
    parser.add_argument("--seed", type=int, default=0, help="by which a sample is chosen")
    parser.add_argument("--shard", default="1/1", help="a part of them, such as 2/4")
    parser.add_argument("--seeds", type=int, default=150, help="how many simulated jobs (default 150)")
    parser.add_argument("--by", choices=("all", "tests", "simulation"), default="all", help="who is to show them")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for each (default {LIMIT:.0f})")
    parser.add_argument("--without-listed", action="store_true", help="leave out who is listed as a survivor")
    parser.add_argument("--list", action="store_true", help="name the mutants, and do nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
