"""The checkpoints of a run as tables that fit a terminal."""

from datetime import UTC, datetime

from rich.text import Text

from quorate.api.checkpoints import NO_KEY, Verified, verify_run
from quorate.api.documents import verified_checkpoints_document
from quorate.cli.layout import NONE, Page, headed_table
from quorate.cli.output import print_document
from quorate.cli.runs_view import age
from quorate.history.checkpoint_list import CheckpointList, CheckpointRecord
from quorate.history.documents import checkpoints_document
from quorate.observe.quantities import measure, size
from quorate.storage.run_folder import RunFolder


def show_list(folder: RunFolder, as_json: bool) -> None:
    """Print what a run has saved."""
    found, now = CheckpointList.read(folder), datetime.now(UTC)
    if as_json:
        print_document(checkpoints_document(found, now))
    else:
        print_list(Page(), found, now)


def show_verified(folder: RunFolder, which: str | None, as_json: bool) -> bool:
    """Read checkpoints of a run through, one or all, and print what was found; whether all are whole."""
    verified = verify_run(folder, which)
    if as_json:
        print_document(verified_checkpoints_document(folder.name, verified))
    else:
        print_verified(Page(), folder.name, verified)
    return not any(each.problem for each in verified.examined)


def print_list(page: Page, found: CheckpointList, now: datetime) -> None:
    """What a run has saved, oldest first, and what is wrong with it."""
    if not found.checkpoints:
        page.line(
            f"Run {found.run} has no checkpoint yet. It saves one every `checkpoint.every` steps and at its end; "
            f"`quorate checkpoint {found.run}` has it save one now, while it runs."
        )
        return
    headings = ("step", "size", "age", "metrics", "kept as", "")
    page.table(headed_table(headings, rows=[_row(each, now) for each in found.checkpoints]))
    for each in found.checkpoints:
        if each.problem:
            page.line(f"{each.name} is damaged: {each.problem}")
        if each.foreign:
            page.line(f"{each.name} is not of this run, and is ignored: {each.foreign}")


def print_verified(page: Page, run: str, verified: Verified) -> None:
    """Which checkpoints are whole, and what is wrong with the others."""
    examined = verified.examined
    if not examined:
        page.line(f"Run {run} has no checkpoint.")
        return
    rows = [
        (
            Text(each.path.name),
            Text(size(each.bytes) if each.bytes else NONE),
            Text("damaged" if each.problem else "whole", style="red" if each.problem else "green"),
        )
        for each in examined
    ]
    page.table(headed_table(("checkpoint", "size", ""), rows=rows))
    for each in examined:
        if each.problem:
            page.line(f"{each.path.name}: {each.problem}")
        if each.foreign:
            page.line(f"{each.path.name} is not of this run, and is ignored: {each.foreign}")
    # Of a run without a key nobody expects it.
    if verified.not_authenticated not in ("", NO_KEY):
        page.line(f"Who wrote them was not checked, only that they are intact: {verified.not_authenticated}")


def _row(each: CheckpointRecord, now: datetime) -> tuple[Text, ...]:
    seconds = each.age(now)
    notes = [("damaged", "red")] if each.problem else []
    notes += [("of another run", "red")] if each.foreign else []
    notes += [("encrypted", "dim")] if each.encrypted else []
    return (
        Text(f"{each.named_step:,}" + (" evaluated" if each.name.endswith("-evaluated") else "")),
        Text(size(each.bytes) if each.bytes else NONE),
        Text(NONE if seconds is None else age(seconds)),
        Text(", ".join(f"{name} {measure(value)}" for name, value in each.metrics.items()) or NONE),
        Text(", ".join(reason.value for reason in each.because) or NONE),
        Text(" ").join(Text(word, style=style) for word, style in notes),
    )
