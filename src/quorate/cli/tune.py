"""The verb that searches for the best job."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.options import Json, Quiet, Set, overrides, run_names
from quorate.core.errors import RequestError
from quorate.core.runs_folder import runs_folder


def tune(
    search_file: Annotated[
        Path | None, typer.Argument(metavar="SEARCH.yaml", help="The search file. For a job file, a space is proposed.")
    ] = None,
    settings: Set = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Use the proposed space without asking.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="SEARCH",
            help="Resume a search: a name, a unique prefix of it, a path, or last.",
            autocompletion=run_names,
        ),
    ] = None,
    runs: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="The folder of searches.", show_default="runs")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Search for the best values of a job's keys.

    Each trial is an ordinary run in the folder of the search. Ctrl-C stops all trials cleanly, a second Ctrl-C stops
    them at once. --resume continues a search that was stopped or killed: no finished trial is repeated, and the others
    resume from their checkpoints. If the file has no space, one is proposed from the task's params and shown first.

    \b
    Examples:
      quorate tune search.yaml
      quorate tune search.yaml --set budget.trials=20 --set job.epochs=3
      quorate tune job.yaml --yes
      quorate tune --resume last
    """
    from quorate.cli.search_view import RunningView, show_search
    from quorate.tune import search as api
    from quorate.tune.loading import read_search
    from quorate.tune.proposal import with_task
    from quorate.tune.search import import_engine

    if (search_file is None) == (resume is None):
        raise RequestError("tune needs a search file, or --resume with the name of a search.")
    if resume is not None:
        if settings:
            raise RequestError("--set changes a search before it begins: it does not go with --resume.")
        search, folder = api.recorded(runs_folder(runs), resume)
    else:
        assert search_file is not None
        search = with_task(read_search(search_file, os.environ, overrides(settings, runs=runs)), import_engine)
        _show_proposal(search, yes)
        folder = api.begin(search)
    with contextlib.closing(RunningView(search, folder, quiet)) as view:
        ended = api.run(search, folder, view.handle, view.tick)
    show_search(folder, as_json)
    raise typer.Exit(ended.exit_code)


def _show_proposal(search: Any, is_accepted: bool) -> None:
    """Show a space that nobody has written, and ask whether to go on with it where somebody can answer."""
    from quorate.tune.proposal import proposal_lines

    lines = proposal_lines(search)
    if not lines:
        return
    print("\n".join(lines), file=sys.stderr, flush=True)
    if is_accepted:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RequestError("the space above is proposed, and there is no terminal to ask on: add --yes to search it.")
    if not typer.confirm("Search this space?", default=True, err=True):
        raise typer.Exit(0)
