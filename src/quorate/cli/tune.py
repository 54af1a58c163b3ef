"""The verb that searches for the best job, and how a search is shown while it runs."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.options import Json, Quiet, Set, overrides, run_names
from quorate.core.errors import RequestError
from quorate.core.runs_folder import runs_folder
from quorate.storage.search_folder import SearchFolder

_REFRESH = 1.0
"""Seconds between two pictures of a search on a terminal."""


def tune(
    search_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="SEARCH.yaml",
            help="The search file. For a job file, a space is proposed.",
        ),
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
        str | None,
        typer.Option(metavar="FOLDER", help="The folder of searches.", show_default="runs"),
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
    from quorate.cli.search_view import show_search
    from quorate.tune import search as api
    from quorate.tune.proposal import open_search
    from quorate.tune.search import import_engine

    if (search_file is None) == (resume is None):
        raise RequestError("tune needs a search file, or --resume with the name of a search.")
    if resume is not None:
        if settings:
            raise RequestError("--set changes a search before it begins: it does not go with --resume.")
        search, folder = api.recorded(runs_folder(runs), resume)
    else:
        assert search_file is not None
        search = open_search(search_file, os.environ, overrides(settings, runs=runs), import_engine)
        _show_proposal(search, yes)
        folder = api.begin(search)
    with contextlib.closing(_View(folder, quiet)) as view:
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


class _View:
    """A search while it runs: a table on a terminal, elsewhere a line for what is worth one."""

    def __init__(self, folder: SearchFolder, is_quiet: bool) -> None:
        from quorate.history.search_log import SearchLog
        from quorate.observe.screen import Screen

        self._folder = folder
        self._is_quiet = is_quiet
        self._log = SearchLog.read(folder.log_file)
        self._screen = Screen(sys.stderr)
        self._next = 0.0
        self._live: Any = None
        self._recorded: Any = None
        if not is_quiet and self._screen.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()

    def handle(self, line: dict[str, Any]) -> None:
        """Take in a line of the search's log."""
        from quorate.cli.search_view import told_in_words

        self._log.take(line)
        is_news = line["kind"] != "reported" or line.get("best")
        if self._live is None and not self._is_quiet and is_news and (said := told_in_words(line, self._record())):
            self._screen.print(said, soft_wrap=True)

    def tick(self) -> None:
        """Draw it anew, now and then."""
        from quorate.cli.search_view import live_view

        if self._live is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _REFRESH
            elapsed = self._log.active_seconds
            view = live_view(self._record(), elapsed, self._screen.width, self._screen.encoding)
            self._live.update(view, refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _record(self) -> Any:
        from quorate.history.search_record import Recorded, SearchRecord

        # Read once: it is asked for at every line, and does not change.
        self._recorded = self._recorded or Recorded.read(self._folder)
        return SearchRecord.of(self._folder, self._log, is_held=True, with_runs=False, recorded=self._recorded)
