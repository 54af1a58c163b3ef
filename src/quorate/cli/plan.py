"""`quorate plan`: what a job needs, told before it is trained."""

import os
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from quorate.cli.options import JobFile, Json, Lanes, Set, Workers, overrides
from quorate.cli.output import print_document


def plan(
    job_file: JobFile,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of a GPU, such as 80GB. By default that of this machine."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N,…", help="Also show how the model could be sharded over these numbers of GPUs, such as 8,16,32."
        ),
    ] = None,
    workers: Workers = None,
    lanes: Lanes = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Show what a job needs, without training it: parameters, memory, communication.

    The task's code runs once on tensors without content, so a model of any size can be planned on any machine, without
    a GPU. One micro-batch of the data is read. If the job does not fit into memory, the plan says what to change; the
    exit code is 0 in both cases.

    \b
    Examples:
      quorate plan job.yaml
      quorate plan job.yaml --memory 80GB
      quorate plan job.yaml --memory 80GB --gpus 8,16,32
      quorate plan job.yaml --set batch_size=512 --json
    """
    from quorate.api.plan import parse_gpus, parse_memory, plan_job
    from quorate.cli.layout import Page
    from quorate.cli.plan_view import show_plan, to_document
    from quorate.spec.load import load_job

    size_of_gpu = None if memory is None else parse_memory(memory)
    numbers = () if gpus is None else parse_gpus(gpus)
    layer = overrides(settings, workers=workers, lanes=lanes)
    job = load_job(job_file, os.environ, layer)
    with redirect_stdout(sys.stderr):  # what the task prints is no part of the answer
        made = plan_job(job, size_of_gpu, numbers)
    if as_json:
        print_document(to_document(made))
    else:
        show_plan(made, Page())
