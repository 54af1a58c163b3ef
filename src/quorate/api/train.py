"""`quorate.train` and `quorate.resume`: where a job is shown, and what becomes of signals that have ended it."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from quorate.api import known_results, session
from quorate.api.callbacks import Callback, refuse_no_list, with_callbacks
from quorate.api.job import Job, JobKeys, overrides_from
from quorate.api.prints import NoDisplay, RunStart, Watch
from quorate.api.recorded_run import short_path
from quorate.api.result import Result
from quorate.api.warm import runner_here
from quorate.core.errors import QuorateError, RequestError, TaskError
from quorate.core.failure import JobFailed
from quorate.core.runs_folder import runs_folder
from quorate.core.user_code import given, user_traceback
from quorate.observe.console import Console, Display, NotebookConsole, notebook_display
from quorate.observe.progress import Progress
from quorate.observe.screen import Screen, print_summary
from quorate.observe.sinks import Prints, Sink
from quorate.supervisor.signals import Signals, collecting_signals


def train(job: Job, progress: bool = True, *, callbacks: Sequence[Callback] = (), debug: bool = False) -> Result:
    """Train a job and return its result. Raises `JobFailed` if the job fails, and `RequestError` for a mistake.

    Progress and a summary are shown on standard error or, in a notebook, under the cell; not with `progress=False`.
    `callbacks` are called after steps, evaluations and checkpoints.

    The first Ctrl-C (in a notebook: interrupting the kernel) completes the running step and saves a checkpoint, the
    second ends the job at once; either raises KeyboardInterrupt when all workers have ended. SIGTERM does the same and
    ends the script with SystemExit. If the program has its own handler for the signal, that is called instead; when it
    returns, `train` returns a result whose `status` is interrupted or terminated. Outside the main thread `train` does
    not handle signals.

    `debug`: one worker, in the calling process, so that `breakpoint()`, pdb and debuggers work in the task. The bits
    are the same if the process was started with PYTHONHASHSEED=0 and one thread for BLAS; a notice tells if not.
    """
    _show_users_frames_alone()
    _refuse_what_is_no_job(job)
    if debug:
        from quorate.api.debug import start_here

        result = shown(lambda watch: start_here(job.resolved, watch), progress, callbacks, is_live=False)
    else:
        result = shown(lambda watch: known_results.start(job.resolved, watch, runner_here()), progress, callbacks)
    return replace(result, task_type=job.task_type)


def launch(  # type: ignore[misc]  # in Python, `callbacks` may be objects, too
    main: Callable[..., Any],
    *,
    progress: bool = True,
    callbacks: Sequence[Callback | str] = (),
    debug: bool = False,
    **keys: Unpack[JobKeys],
) -> Result:
    """Run `main(run)`, a training loop of your own, in every worker; with the same bits on any number of workers.

    ::

        if __name__ == "__main__":
            quorate.launch(main, lanes=4, workers=3, batch_size=64, epochs=3)

    The keys are those of `Job`; the other arguments of `main` are set by `params`. Returns and raises like `train`;
    `debug` is as there.
    """
    _show_users_frames_alone()
    refuse_no_list(callbacks)
    called: Any = main
    if not callable(called) and not isinstance(called, str):
        raise TaskError(
            f"quorate.launch takes the function itself and was given {given(main)}. Write quorate.launch(main, ...), "
            "without calling it: every worker calls it with a `run` of its own."
        )
    named = [each for each in callbacks if isinstance(each, str)]
    made = [each for each in callbacks if not isinstance(each, str)]
    return train(Job(task=main, callbacks=named, **keys), progress, callbacks=made, debug=debug)


def _show_users_frames_alone() -> None:
    """Of our errors, where nobody catches them: Python would end with frames of ours, which say nothing to a caller."""
    if sys.excepthook is not sys.__excepthook__:  # there is somebody who shows errors in another way
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, QuorateError) and sys.stderr is not None:
            print(user_traceback(error), file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = show


def _refuse_what_is_no_job(job: object) -> None:
    if isinstance(job, Job):
        return
    remedy = "quorate.train(quorate.Job(task=..., batch_size=..., epochs=...))"
    if isinstance(job, str | os.PathLike):
        remedy = f'quorate.train(quorate.Job.from_file("{os.fspath(job)}"))'
    elif isinstance(job, type):
        remedy = f"quorate.train(quorate.Job(task={job.__name__}, batch_size=..., epochs=...))"
    raise RequestError(f"quorate.train takes a quorate.Job and was given {given(job)}. Write {remedy}.")


def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    runs: str | Path | None = None,
    branch: bool = False,
    task: Any = None,
    trust_source: bool = False,
    trust_job: bool = False,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Resume a run from its newest valid checkpoint, and return its result. Returns and raises like `train`.

    `run` is a name, a unique prefix of one, a path, ``"last"``, or the address of a copy of a run, such as
    ``s3://bucket/prefix/digits-0001``, which is fetched first.
    `overrides` (dotted keys, such as ``{"workers": 3}``) may change keys that affect only how the job runs, and add
    epochs or steps. With `branch` a new run starts from the checkpoint, and other keys may change, too.
    `task` (a class, ``"file.py:Class"`` or ``"package.module:Class"``) says where the task is now, if it has moved.
    `trust_source`: run the task's source that is stored with a copy of a run, even if no key authenticates it.
    `trust_job`: use what the job that is stored with a copy names: callbacks, commands, addresses and destinations.
    """
    _show_users_frames_alone()
    layer = overrides_from("quorate.resume", overrides, task)
    resume_run = partial(session.resume, runs_folder(runs), str(run), os.environ, layer, runner=runner_here())
    resume_run = partial(resume_run, branch=branch, trust_source=trust_source, trust_job=trust_job)
    return shown(lambda watch: resume_run(watch=watch), progress, callbacks)


def shown(
    run: Callable[[Watch], Result], progress: bool, callbacks: Sequence[Callback] = (), *, is_live: bool = True
) -> Result:
    """Run a job, show it where it is looked at, and let a signal that has ended it do what it does without one."""
    watch = watch_here(progress, is_live=is_live)
    try:
        with passing_on_signals() as signals:
            result = run(with_callbacks(watch, callbacks))
    except QuorateError as error:
        raise error.with_traceback(None) from None  # the message says it; our own frames say nothing to the caller
    if isinstance(watch, NotebookDisplay):
        watch.conclude(result)
    elif progress and (screen := _stderr()) is not None:
        print_summary(result.fields, screen)
    where = "before its first step"
    if result.steps:
        where = f'at step {result.steps}; quorate.resume("{result.run}") resumes it'
    pass_on_signal(result.exit_code, f"run {result.run} was {result.status} {where}", signals.received)
    return result


def show_on_stderr(begun: RunStart, prints: Prints = Prints.FIRST) -> Sink:
    """A live bar on a terminal, a line now and then elsewhere; and what the task prints."""
    screen = _stderr()
    return NoDisplay() if screen is None else Console(screen, _progress(begun), prints=prints)


def show_lines(begun: RunStart, prints: Prints = Prints.FIRST) -> Sink:
    """A line now and then, also on a terminal, which a debugger's prompt has for itself."""
    screen = _stderr(is_terminal=False)
    return NoDisplay() if screen is None else Console(screen, _progress(begun), prints=prints)


def show_quietly(begun: RunStart, prints: Prints = Prints.NONE) -> Sink:
    """No progress, but warnings, and that the job is being stopped."""
    screen = _stderr()
    return NoDisplay() if screen is None else Console(screen, _progress(begun), prints=prints, is_quiet=True)


class NotebookDisplay:
    """Shows one run under a cell, and at its end a table of its result."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._console: NotebookConsole | None = None

    def __call__(self, begun: RunStart) -> Sink:
        self._console = NotebookConsole(self._display, _progress(begun))
        return self._console

    def conclude(self, result: Result) -> None:
        if self._console is not None:
            self._console.summarise(result.fields)


def watch_here(progress: bool, *, is_live: bool = True) -> Watch | NotebookDisplay:
    """How a job is shown that a script or a notebook starts."""
    display = notebook_display() if progress else None
    if display is not None:
        return NotebookDisplay(display)
    shown = show_on_stderr if is_live else show_lines
    return shown if progress else lambda _: NoDisplay()


def _stderr(*, is_terminal: bool | None = None) -> Screen | None:
    # There is none in a program that was started with its standard error closed.
    return None if sys.stderr is None else Screen(sys.stderr, is_terminal)


def _progress(begun: RunStart) -> Progress:
    return Progress(
        run=begun.run.name,
        folder=short_path(begun.run.path),
        workers=begun.workers,
        lanes=begun.spec.lanes,
        early_stop=begun.spec.early_stop,
    )


@contextlib.contextmanager
def passing_on_signals() -> Iterator[Signals]:
    """Around a job that raises `JobFailed` also when a signal has ended it; the signals that came while it ran."""
    with collecting_signals() as signals:
        try:
            yield signals
        except JobFailed as failed:
            pass_on_signal(failed.failure.exit_code, failed.message, signals.received)
            raise


def pass_on_signal(exit_code: int, message: str, received: Sequence[int] = ()) -> None:
    """Let a signal do what it does without a job, now that the job is over: end what the job was a part of.

    Without this, Ctrl-C in a loop over several jobs would only begin the next one. It is the first that was `received`:
    the exit code does not tell SIGHUP from SIGTERM.
    """
    if exit_code <= 128:
        return
    number = received[0] if received else exit_code - 128
    handler = signal.getsignal(number)
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, None)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt(message) from None
    else:
        raise SystemExit(exit_code) from None
