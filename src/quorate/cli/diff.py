"""`quorate diff`."""

import sys
from typing import Annotated

import typer

from quorate.cli.completion import run_names
from quorate.cli.document import print_document
from quorate.cli.options import RUNS, Json, Run, Runs

Other = Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.", autocompletion=run_names)]


def diff(
    run: Run,
    other: Other,
    tensor: Annotated[
        bool, typer.Option("--tensor", help="Replay the step at which they part, and name the tensors that differ.")
    ] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Compare two runs: their keys, their metrics, and the first step at which they part.

    Two runs part where loss or gradient norm differ in any bit. With --tensor both are trained again, from the
    checkpoint before that step, in a folder that is thrown away.

    \b
    Examples:
      quorate diff digits-0001 digits-0002
      quorate diff digits-0001 last --tensor
    """
    from quorate.cli.difference_view import document, print_difference
    from quorate.history.difference import RunPair
    from quorate.storage.run_folder import RunFolder

    pair = RunPair.read(RunFolder.find(runs, run), RunFolder.find(runs, other))
    replayed = None
    if tensor and pair.comparison.parting is not None:
        from quorate.api.replay import replay

        parting = pair.comparison.parting
        told = tuple({name: values[side] for name, values in parting.values.items()} for side in (0, 1))
        replayed = replay((pair.left.folder, pair.right.folder), parting.step, (told[0], told[1]))
    if as_json:
        print_document(document(pair, replayed))
    else:
        print_difference(pair, replayed, sys.stdout, is_terminal=sys.stdout.isatty())
