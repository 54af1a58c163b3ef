"""The verb that searches for the best job."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.options import RUNS, Json, Runs, Set, job_files, overrides
from quorate.cli.output import print_document
from quorate.core.errors import RequestError
from quorate.observe.quantities import measure
from quorate.storage.run_folder import runs_folder
from quorate.storage.search_folder import SearchFolder


def search_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names of searches that begin like this, for the shell."""
    runs = runs_folder(context.params.get("runs"))
    return [folder.name for folder in SearchFolder.all_in(runs) if folder.name.startswith(incomplete)]


def tune(
    search_file: Annotated[
        Path | None,
        typer.Argument(metavar="SEARCH.yaml", help="The search file, or a job file.", autocompletion=job_files),
    ] = None,
    settings: Set = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="SEARCH",
            help="Go on with a search: a name, a unique prefix of it, a path, or last.",
            autocompletion=search_names,
        ),
    ] = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Search for the best values of a job's keys.

    Each trial is an ordinary run in the search's own folder. Ctrl-C stops all trials in order; --resume goes on with a
    search that was stopped or killed: no finished trial is repeated, and the others go on from their checkpoints.

    \b
    Examples:
      quorate tune search.yaml
      quorate tune search.yaml --set budget.trials=20 --set job.epochs=3
      quorate tune --resume last
    """
    from quorate.spec.search_load import load_search
    from quorate.tune import search as api

    if (search_file is None) == (resume is None):
        raise RequestError("tune needs a search file, or --resume with the name of a search.")
    if resume is not None:
        if settings:
            raise RequestError("--set changes a search before it begins: it does not go with --resume.")
        search, folder = api.recorded(runs, resume)
    else:
        assert search_file is not None
        search = load_search(search_file, os.environ, overrides(settings))
        folder = api.begin(search)
    ended = api.run(search, folder, _Lines())
    if as_json:
        print_document({"search": folder.name, "folder": str(folder.path), "reason": ended.reason})
    if ended.exit_code:
        print(f"next: quorate tune --resume {folder.name}", file=sys.stderr)
    raise typer.Exit(ended.exit_code)


class _Lines:
    """Tells what happens in a line each, where there is no terminal."""

    def __call__(self, line: dict[str, Any]) -> None:
        if text := sentence(line):
            print(text, file=sys.stderr, flush=True)


_SENTENCES: dict[str, str] = {
    "resumed": "trial {trial} goes on from step {step:,}",
    "stopped": "trial {trial} stopped at step {step:,}: {reason}",
    "exploited": "trial {trial} at step {step:,}: {reason}",
    "failed": "trial {trial} failed: {message}",
    "search-ended": "the search has ended: {reason}",
}


def sentence(line: dict[str, Any]) -> str:
    """What a line of the search's log says to a person; nothing where that is not worth a line."""
    if line["kind"] == "proposed":
        given = ", ".join(f"{key.removeprefix('params.')} {value}" for key, value in line["params"].items())
        return f"trial {line['trial']}: {given}"
    if line["kind"] == "finished":
        told = ", ".join(f"{name} {measure(value)}" for name, value in line["metrics"].items())
        return f"trial {line['trial']} finished after {line['step']:,} steps: {told}"
    return _SENTENCES.get(line["kind"], "").format(**line)
