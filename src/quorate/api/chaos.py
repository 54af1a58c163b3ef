"""A job under faults beside the same job undisturbed."""

import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.api import session
from quorate.api.prints import RunStart, Watch
from quorate.api.result import Result, open_run
from quorate.api.run_part import refuse_cluster
from quorate.chaos.network_namespaces import can_make_networks
from quorate.chaos.script import (
    EXAMPLE,
    PHASES,
    Fault,
    Firing,
    Whom,
    check_script,
    firings,
    lines_of,
    parse_mean,
    parse_script,
    random_script,
)
from quorate.chaos.supervisor_hook import run_under
from quorate.core.errors import QuorateError, RequestError, RunError
from quorate.core.failure import Failure, JobFailed
from quorate.core.machine import usable_cores
from quorate.history.ledger import Ledger
from quorate.observe.sinks import Sink
from quorate.spec.changes import changes
from quorate.spec.device import workers_here
from quorate.spec.job import JobSpec
from quorate.spec.keys import Mark
from quorate.spec.load import load_recorded
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder


@dataclass(frozen=True)
class FaultRequest:
    """Written faults; or, with a mean number of steps between two of them, random ones."""

    written: tuple[Fault, ...]
    mean: float | None = None
    seed: int = 0

    @classmethod
    def of(
        cls, texts: list[str] | None, script: Path | None, random: bool, mtbf: str | None, seed: int | None
    ) -> "FaultRequest":
        """What was asked for, checked as far as that goes without the job."""
        if random:
            if texts or script:
                raise RequestError("--random makes the faults itself: leave out --fault and --script, or --random.")
            if mtbf is None:
                raise RequestError("--random needs to know how often: add --mtbf, such as --mtbf 20steps or --mtbf 5s.")
            return cls((), parse_mean(mtbf), seed or 0)
        if mtbf is not None:
            raise RequestError("--mtbf is for --random, which is not given: add it, or leave out --mtbf.")
        if seed is not None:
            raise RequestError(
                f"--seed is that of --random, which is not given. The seed of the job is set with --set seed={seed}"
            )
        lines = [("--fault", text) for text in texts or ()]
        try:
            lines += [] if script is None else lines_of(script.read_text(), str(script))
        except OSError as error:
            raise RequestError(f"cannot read the fault script {script}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise RequestError(f"the fault script {script} is not text in UTF-8.") from None
        if not lines:
            raise RequestError(
                f'no fault is given: write --fault "{EXAMPLE}", --script FILE with one such line for each fault, or '
                "--random --mtbf 5s."
            )
        return cls(parse_script(lines))

    def script(self, spec: JobSpec, steps: int | None) -> tuple[Fault, ...]:
        """The faults for a job; random ones need to know how many steps it has.

        They cut workers off where this process can make networks for that.
        """
        workers = workers_here(spec, usable_cores())
        if self.mean is None:
            check_script(self.written, workers, steps, spec.lanes, spec.strategy.server_count)
            return self.written
        if steps is None:
            return ()
        every = spec.checkpoint.every
        faults = random_script(
            self.seed,
            steps,
            workers,
            self.mean,
            spec.lanes,
            can_cut=can_make_networks(),
            saves_every=None if every == "epoch" else every,  # how many steps an epoch has is not known yet
            has_loaders=spec.loader_workers > 0,
            servers=spec.strategy.server_count,
        )
        if not faults:
            raise RequestError(
                f"--mtbf is {self.mean:g} steps and the job has {steps}: with --seed {self.seed} it ends before the "
                "first fault. Give a smaller --mtbf, or another --seed."
            )
        return faults


@dataclass(frozen=True)
class Trial:
    """What became of a job under faults. With a failure it has not ended, and there is nothing to compare.

    `differing_facts` are what the bits depend on, and is not the same for both: the task's source, a version of a
    library. A job whose weights depend on who was when at work does not promise bits.
    """

    undisturbed: Result
    disturbed: Result
    failure: Failure | None
    faults: tuple[Fault, ...]
    firings: tuple[Firing, ...]
    differing_facts: tuple[str, ...]
    promises_bits: bool = True

    @property
    def is_same(self) -> bool:
        """Whether it came to the same bits; where the job promises none, whether it has used the same samples."""
        if self.failure is not None:
            return False
        if not self.promises_bits:
            return bool(self.disturbed.fields.get("ledger") == self.undisturbed.fields.get("ledger"))
        return self.disturbed.weights_digest == self.undisturbed.weights_digest

    @property
    def have_all_fired(self) -> bool:
        """Whether every fault came about: otherwise nothing is shown."""
        return {firing.fault for firing in self.firings} == set(range(len(self.faults)))

    def firings_of(self, number: int) -> list[Firing]:
        return [firing for firing in self.firings if firing.fault == number]

    def document(self, ledger: Ledger) -> dict[str, Any]:
        """As `quorate chaos --json` prints it."""
        return {
            "undisturbed_run": self.undisturbed.run,
            "undisturbed_digest": self.undisturbed.weights_digest,
            "run": self.disturbed.run,
            "folder": str(self.disturbed.folder),
            "status": "complete" if self.failure is None else "failed",
            "steps": self.disturbed.steps,
            "digest": None if self.failure else self.disturbed.weights_digest,
            "same": self.is_same,
            "failure": None if self.failure is None else self.failure.to_dict(),
            "differing_facts": list(self.differing_facts),
            "ledger_whole": ledger.is_whole,
            "faults": [
                {
                    "fault": str(fault),
                    "fired": bool(self.firings_of(number)),
                    "firings": [
                        {"worker": one.worker, "pid": one.pid, "step": one.step, "phase": phase_of(one)}
                        for one in self.firings_of(number)
                    ],
                }
                for number, fault in enumerate(self.faults)
            ],
            "recoveries": self.disturbed.recoveries,
        }


def phase_of(firing: Firing) -> str:
    """The phase in which a fault came about, by the name that fault scripts use."""
    return next((name for name, status in PHASES.items() if status == firing.phase), firing.phase)


def try_under(request: FaultRequest, resolved: ResolvedJob, against: str | None, watch: Watch) -> Trial | Result:
    """Run a job under faults in a run folder of its own, and compare it with a complete run of the same job: the one
    that is named, or one that is trained first. A run that was stopped by a signal is returned as it is: there is
    nothing to compare.

    Raises what stops it, but not what the faults have led to.
    """
    refuse_cluster(resolved.spec, "faults are brought about")
    undisturbed = None if against is None else _reference(against, resolved)
    # What is wrong is refused before anything is trained, as far as the number of steps is known.
    request.script(resolved.spec, resolved.spec.steps if undisturbed is None else undisturbed.steps)
    if undisturbed is None:
        undisturbed = session.start(resolved, watch)
        if undisturbed.exit_code:
            return undisturbed
    faults = request.script(resolved.spec, undisturbed.steps)
    kills_launcher = any(fault.whom is Whom.LAUNCHER for fault in faults)
    disturbed, failure = (_run_separately if kills_launcher else _run_here)(faults, resolved, watch)
    if failure is None and disturbed.exit_code:
        return disturbed
    before, after = (RunFolder(each.folder).read_environment() or {} for each in (undisturbed, disturbed))
    facts = tuple(name for name, value in before.items() if after.get(name, value) != value)
    fired = tuple(firings(RunFolder(disturbed.folder).logs))
    spec = resolved.spec
    # A gang that waits for whoever takes the place of a lost worker adds in the same order again.
    is_as_many = spec.strategy.is_synchronous and spec.workers == spec.min_workers
    promises_bits = spec.strategy.fixes_bits or is_as_many
    return Trial(undisturbed, disturbed, failure, faults, fired, facts, promises_bits)


def _reference(run: str, resolved: ResolvedJob) -> Result:
    """A complete run of the same job, to compare with."""
    result = open_run(run, resolved.spec.runs)
    if result.status != "complete":
        raise RunError(
            f"run {result.run} is {result.status}, so there is nothing to compare with. Name a complete run, or leave "
            "out --against: then the job is run undisturbed first."
        )
    recorded = load_recorded(RunFolder(result.folder).job_file, {}, []).spec
    changed = [change for change in changes(recorded, resolved.spec) if change.mark is Mark.MEANING]
    if changed:
        raise RunError(
            f"run {result.run} is not a run of this job: {'; '.join(map(str, changed))}. Name a run of the "
            "same job, or leave out --against: then the job is run undisturbed first."
        )
    return result


def _run_here(faults: tuple[Fault, ...], resolved: ResolvedJob, watch: Watch) -> tuple[Result, Failure | None]:
    begun: list[RunFolder] = []

    def look(start: RunStart) -> Sink:
        begun.append(start.run)
        return watch(start)

    try:
        return session.start(resolved, look, run_under(faults)), None
    except JobFailed as error:
        if error.exit_code != JobFailed.exit_code or not begun:
            raise
        return open_run(begun[0].path), error.failure


def _run_separately(faults: tuple[Fault, ...], resolved: ResolvedJob, watch: Watch) -> tuple[Result, Failure | None]:
    """With launchers that are killed: each time the run is resumed, as somebody would who finds it dead."""
    code, run = _launch(resolved, faults, watch, None)
    for _ in range(sum(fault.whom is Whom.LAUNCHER for fault in faults)):
        if run is not None and code == -signal.SIGKILL:
            code, run = _launch(resolved, faults, watch, run)
    if run is None:
        raise RunError("the job could not be started; see the error above.")
    result = open_run(run)
    failure = result.fields.get("failure")
    if failure is None and code != 0:
        return result, Failure("JobError", f"the job was not resumed (code {code}): see the messages above.")
    return result, None if failure is None else Failure.from_dict(failure)


def _launch(
    resolved: ResolvedJob, faults: tuple[Fault, ...], watch: Watch, run: Path | None
) -> tuple[int, Path | None]:
    """Start or resume a job in a launcher of its own: its exit code, negative for a signal, and its run, if it got so
    far."""
    # Ctrl-C goes to the child as well, which stops in order.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; raise SystemExit(main())"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            output, _ = child.communicate(pickle.dumps((sys.path, resolved, faults, watch, run)))
        except BaseException:
            # Whoever is told to end does not leave a job behind.
            child.terminate()
            child.wait()
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    return child.returncode, run or (Path(output.decode().strip()) if output.strip() else None)


def main() -> int:
    """In a launcher that can be killed: train what standard input holds as a pickle, and print which run it is."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path, resolved, faults, watch, run = pickle.load(sys.stdin.buffer)
    sys.path[:] = path

    def print_run(start: RunStart) -> Sink:
        print(start.run.path, flush=True)
        sink: Sink = watch(start)
        return sink

    try:
        if run is None:
            session.start(resolved, print_run, run_under(faults))
        else:
            session.resume(run.parent, str(run), os.environ, [], watch=watch, runner=run_under(faults))
    except QuorateError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0
