"""`quorate eval`."""

import os
import sys
from typing import Annotated

import typer

from quorate.cli.document import print_document
from quorate.cli.options import RUNS, Averaged, Json, Run, Runs, Set, Task, Workers


def evaluate(
    run: Run,
    checkpoint: Annotated[str, typer.Option(metavar="WHICH", help="last, best, or a step.")] = "last",
    averaged: Averaged = None,
    workers: Workers = None,
    task: Task = None,
    settings: Set = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Evaluate a run's checkpoint on the validation set. The run itself stays as it is.

    The result has the same bits on any number of workers. With --set params.… the task may read other data.

    \b
    Examples:
      quorate eval last
      quorate eval digits-0001 --checkpoint best --workers 2
    """
    from quorate.api.evaluate import evaluate_run
    from quorate.cli.overrides import overrides
    from quorate.observe.summary import print_summary

    layer = overrides(settings, workers=workers, task=task)
    done = evaluate_run(runs, run, checkpoint, os.environ, layer, averaged=averaged)
    if as_json:
        fields = {
            "run": done.run,
            "checkpoint": str(done.checkpoint),
            "step": done.step,
            "averaged": done.averaged,
            "metrics": done.metrics,
            "weights_digest": done.weights_digest,
        }
        print_document(fields)
        return
    summary = {
        "run": done.run,
        "status": f"at step {done.step:,}" + (", averaged weights" if done.averaged else ""),
        "final_metrics": done.metrics,
        "weights_digest": done.weights_digest,
    }
    print_summary(summary, sys.stdout, is_terminal=sys.stdout.isatty())
