"""`quorate clean`: remove old runs, or thin their checkpoints."""

import re
import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from quorate.cli.options import RUNS, Json, Runs, choose
from quorate.core.errors import QuorateError, RequestError

_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


def clean(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only runs that ended so long ago: 12h, 30d, 8w or 1y.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, metavar="N", help="Keep the newest N runs.")] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Keep the runs, and of their checkpoints only the best and the last.")
    ] = False,
    name: Annotated[str, typer.Option(metavar="PREFIX", help="Only runs whose name begins with this.")] = "",
    status: Annotated[
        list[str] | None, typer.Option(metavar="STATUS", help="Only runs with this status. Repeatable.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove them without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and remove nothing.")] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Remove old runs, or thin their checkpoints, after showing what goes and how much space that frees.

    With --older-than and --keep, a run goes if both allow it. These stay: runs that are running, the best run of each
    job, searches with their trials, and runs whose model is registered. What mlflow.db in the folder of runs has of a
    run goes with it; other trackers and copies of checkpoints are left alone.

    \b
    Examples:
      quorate clean --older-than 30d
      quorate clean --keep 10 --name digits --yes
      quorate clean --older-than 2w --checkpoints
    """
    from quorate.api import clean as api
    from quorate.history.run_record import RunQuery, Status

    if older_than is None and keep is None:
        raise RequestError("say what may go: --older-than 30d, --keep 10, or both.")
    query = RunQuery(tuple(choose(word, Status, "--status") for word in status or ()), name=name)
    now = datetime.now(UTC)
    plan = api.plan(runs, query, now, _seconds(older_than), keep, only_checkpoints=checkpoints)
    if not as_json:
        _show(plan, now)
    if yes and dry_run:
        raise RequestError("--yes removes, and --dry-run does not: give one of them.")
    is_wanted = bool(plan.found) and not dry_run and (yes or (not as_json and _is_confirmed()))
    gone, kept = list(plan.found), list(plan.kept)
    for found in plan.found if is_wanted else ():
        try:
            api.remove(found)
        except QuorateError as error:
            gone.remove(found)
            kept.append((found.record.name, error.message))
            if not as_json:
                print(f"{found.record.name} stays: {error.message}")
    if as_json or is_wanted:
        from quorate.cli.output import print_answer
        from quorate.observe.quantities import size

        document = _document(gone, kept, now, yes)
        print_answer(as_json, document, f"Removed: {size(document['bytes'])} freed.")
    raise typer.Exit(1 if len(gone) < len(plan.found) else 0)


def _seconds(age: str | None) -> float | None:
    if age is None:
        return None
    match = re.fullmatch(r"(\d+)([hdwy])", age.strip())
    if match is None:
        raise RequestError(f"--older-than: {age!r} is no age; write a number and h, d, w or y, such as 30d.")
    return float(int(match[1]) * _SECONDS[match[2]])


def _is_confirmed() -> bool:
    if not sys.stdin.isatty():
        print("Nothing was removed: add --yes to remove it.")
        return False
    return typer.confirm("Remove it?", default=False)


def _show(plan: Any, now: datetime) -> None:
    from quorate.api.clean import age_of
    from quorate.cli.layout import Page, headed_table
    from quorate.observe.quantities import age, size

    page = Page()
    rows = []
    for each in plan.found:
        what = "all of it" if each.checkpoints is None else f"checkpoints {_steps(each.checkpoints)}"
        rows.append((each.record.name, each.record.status.value, age(age_of(each.record, now)), size(each.bytes), what))
    if rows:
        page.table(headed_table(("name", "status", "age", "size", "what goes"), rows=rows))
    for name, why in plan.kept:
        page.line(f"{name} stays: {why}")
    count = f"{len(rows)} run" if len(rows) == 1 else f"{len(rows)} runs"
    total = size(sum(each.bytes for each in plan.found))
    page.line(f"{count}, {total} to be freed." if rows else "There is nothing to remove.")


def _steps(infos: Any) -> str:
    return ", ".join(str(info.cursor.step) for info in infos)


def _document(gone: list[Any], kept: list[tuple[str, str]], now: datetime, is_removed: bool) -> dict[str, Any]:
    from quorate.api.clean import age_of

    runs = [
        {
            "run": each.record.name,
            "status": each.record.status.value,
            "age_seconds": int(age_of(each.record, now)),
            "bytes": each.bytes,
            "checkpoints": None if each.checkpoints is None else [info.path.name for info in each.checkpoints],
        }
        for each in gone
    ]
    return {
        "removed": is_removed,
        "bytes": sum(each.bytes for each in gone),
        "runs": runs,
        "kept": [{"run": name, "why": why} for name, why in kept],
    }
