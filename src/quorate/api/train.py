"""`quorate.train` and `quorate.resume`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quorate.api import session
from quorate.api.job import Job
from quorate.api.result import Result
from quorate.observe.console import Console
from quorate.spec.override import Override


def train(job: Job, progress: bool = True) -> Result:
    """Train a job here and return how it ended; a failed job raises `JobFailed`."""
    return session.start(job.resolved, show_on_stderr if progress else show_nothing)


def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    runs: str | Path = "runs",
    branch: bool = False,
    progress: bool = True,
) -> Result:
    """Go on from the newest whole checkpoint of a run; `overrides` (dotted keys) may change how it runs."""
    layer = [Override(key, value, "quorate.resume") for key, value in (overrides or {}).items()]
    watch = show_on_stderr if progress else show_nothing
    return session.resume(Path(runs), str(run), os.environ, layer, watch=watch, branch=branch)


def show_on_stderr(begun: session.Begun) -> session.Show:
    """A live bar on a terminal, a line now and then elsewhere."""
    return Console(
        sys.stderr,
        is_terminal=sys.stderr.isatty(),
        total_steps=None,
        workers=begun.workers,
        lanes=begun.lanes,
    )


def show_nothing(_: session.Begun) -> session.Show:
    """No progress at all."""
    return session.Silence()
