"""`quorate checkpoints`: one verb for each thing that can be done with the checkpoints of a run."""

import contextlib
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from quorate.cli.options import RUNS, Averaged, Json, Run, Runs, Task, TrustJob, Which, choose, group_of_verbs, to_file
from quorate.cli.output import NONE, print_answer, print_document
from quorate.cli.proof import recreate, trusted
from quorate.core.errors import RequestError
from quorate.observe.quantities import age, measure, size
from quorate.storage.run_folder import RunFolder

if TYPE_CHECKING:  # torch, pydantic and rich, which a help text does without
    from rich.text import Text

    from quorate.api.checkpoints import Verified
    from quorate.cli.layout import Page
    from quorate.history.run_detail import CheckpointList, CheckpointRecord

OptionalWhich = Annotated[
    str | None, typer.Option("--checkpoint", metavar="WHICH", help="last, best, or a step. By default all.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The file that holds the present key, if it is not where the job says."),
]
KeyEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="The environment variable that holds the present key, likewise.")
]

app = group_of_verbs("checkpoints")


@app.callback()
def checkpoints() -> None:
    """List, verify, export, recreate, encrypt and remove the checkpoints of a run.

    \b
    Examples:
      quorate checkpoints ls last
      quorate checkpoints verify last
      quorate checkpoints export last -o model.safetensors --checkpoint best
      quorate checkpoints recreate last --step 150
      quorate checkpoints rm last --checkpoint 100
    """


app.command()(recreate)


@app.command("ls")
def list_all(run: Run, runs: Runs = RUNS, as_json: Json = False) -> None:
    """List the checkpoints of a run: size, age, metrics, and why each is kept.

    The contents are not read; to find damage in them, use verify.

    \b
    Examples:
      quorate checkpoints ls last
      quorate checkpoints ls digits-0001 --json
    """
    from quorate.cli.layout import Page
    from quorate.history.documents import checkpoints_document
    from quorate.history.run_detail import CheckpointList

    found, now = CheckpointList.read(RunFolder.find(runs, run)), datetime.now(UTC)
    if as_json:
        print_document(checkpoints_document(found, now))
    else:
        print_list(Page(), found, now)


@app.command()
def verify(run: Run, checkpoint: OptionalWhich = None, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Read checkpoints in full and compare them with their digests.

    The exit code is 1 if a checkpoint is damaged, and the damaged file is named. If the run is encrypted and its key is
    available, a checkpoint that was not written with this key counts as damaged, too; without the key, the output says
    that this was not checked.

    \b
    Examples:
      quorate checkpoints verify last
      quorate checkpoints verify digits-0001 --checkpoint best
    """
    from quorate.api.checkpoints import verify_run
    from quorate.cli.layout import Page

    folder = RunFolder.find(runs, run)
    verified = verify_run(folder, checkpoint)
    if as_json:
        print_document(verified.document(folder.name))
    else:
        print_verified(Page(), folder.name, verified)
    raise typer.Exit(1 if any(each.problem for each in verified.examined) else 0)


class _Export(TyperCommand):
    """Its file is still taken behind the run, too, as it was given before; the usage is without."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return super().collect_usage_pieces(ctx)[:-1]


@app.command(cls=_Export)
def export(
    run: Run,
    output: Annotated[Path | None, to_file("The file to write, or a folder to write it in.")] = None,
    out: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    checkpoint: Which = "last",
    kind: Annotated[
        str | None, typer.Option("--format", help="safetensors or torch. By default by the ending of FILE.")
    ] = None,
    averaged: Averaged = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    task: Task = None,
    trust_job: TrustJob = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Export a run's model to a file that PyTorch reads without Quorate.

    The file is in safetensors format or a torch state_dict (.pt, .pth). It has the names of the model's own state_dict,
    so load_state_dict accepts it. The task builds the model; if its file is gone, the copy of its source in the run
    folder is used.

    \b
    Examples:
      quorate checkpoints export last -o model.safetensors
      quorate checkpoints export last -o model.pt --checkpoint best
    """
    from quorate.api.checkpoints import Format, export_model

    file = output or out
    if file is None:
        raise RequestError("export needs the file to write: -o model.safetensors")
    folder = trusted(runs, run, trust_job or task is not None)
    wanted = choose(kind, Format, "--format") if kind else None
    # What the task prints while it builds the model is no part of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        done = export_model(folder, file, checkpoint, wanted, force=force, averaged=averaged, task=task)
    files = {name: str(getattr(done, name).absolute()) for name in ("checkpoint", "file")}
    fields = {"run": folder.name, **asdict(done), **files, "averaged": bool(done.averaged)}
    weights = {None: "", True: ", averaged weights", False: ", trained weights"}[done.averaged]
    what = f"{done.tensors} tensors of step {done.step:,}{weights}, {size(done.bytes)}"
    sentence = f"{done.file}: {what}, as {'safetensors' if done.format is Format.SAFETENSORS else 'a torch file'}."
    print_answer(as_json, fields, sentence)


@app.command()
def rekey(
    run: Run,
    new_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The file that holds the new key.")] = None,
    new_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable that holds the new key.")
    ] = None,
    decrypt: Annotated[bool, typer.Option("--decrypt", help="Use no key: store the checkpoints unencrypted.")] = False,
    key_file: KeyFile = None,
    key_env: KeyEnv = None,
    include_untrusted: Annotated[
        bool,
        typer.Option(
            "--include-untrusted", help="Also rewrite checkpoints that the present key does not authenticate."
        ),
    ] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Encrypt the checkpoints of a run with another key.

    Checkpoints are rewritten one after the other, each atomically, so that all can be read at any time. The run is then
    resumed with the new key. Copies in other places are replaced when the run is resumed. In a run that is encrypted
    already, checkpoints that were not written with its key are refused: anybody could have put them there. A key is 32
    bytes; openssl rand -hex 32 creates one.

    \b
    Examples:
      quorate checkpoints rekey last --new-key-file ~/keys/second
      quorate checkpoints rekey digits-0001 --new-key-env CHECKPOINT_KEY
    """
    from quorate.encryption.key import rekey_run

    if [new_key_file is not None, new_key_env is not None, decrypt].count(True) != 1:
        raise RequestError("give exactly one of --new-key-file, --new-key-env and --decrypt")
    if key_file is not None and key_env is not None:
        raise RequestError("give --key-file or --key-env, not both")
    folder = RunFolder.find(runs, run)
    places = (_key_place(new_key_file, new_key_env), _key_place(key_file, key_env))
    rewritten = rekey_run(folder, *places, include_untrusted=include_untrusted)
    fields = {"run": folder.name, "encrypted": not decrypt, "rewritten": list(rewritten)}
    how = "in plain" if decrypt else "under the new key"
    print_answer(as_json, fields, f"{folder.name}: {len(rewritten)} rewritten; all are {how}.")


@app.command()
def rm(
    run: Run,
    checkpoint: Annotated[
        list[str], typer.Option("--checkpoint", metavar="WHICH", help="last, best, or a step. Repeatable.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Also remove the only valid checkpoint.")] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Remove checkpoints of a run. The only valid one is not removed without --force.

    \b
    Examples:
      quorate checkpoints rm last --checkpoint 100
      quorate checkpoints rm digits-0001 --checkpoint 100 --checkpoint 200
    """
    from quorate.api.checkpoints import remove_from_run

    folder = RunFolder.find(runs, run)
    removed = remove_from_run(folder, checkpoint, force=force)
    total = sum(each.bytes for each in removed)
    names = [each.path.name for each in removed]
    sentence = f"removed {', '.join(names)} of {folder.name}: {size(total)}."
    print_answer(as_json, {"run": folder.name, "removed": names, "bytes": total}, sentence)


def _key_place(file: Path | None, variable: str | None) -> dict[str, str | None] | None:
    if file is None and variable is None:
        return None
    return {"key_file": None if file is None else str(file.expanduser().absolute()), "key_env": variable}


def print_list(page: "Page", found: "CheckpointList", now: datetime) -> None:
    """What a run has saved, oldest first, and what is wrong with it."""
    from quorate.cli.layout import headed_table

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


def print_verified(page: "Page", run: str, verified: "Verified") -> None:
    """Which checkpoints are whole, and what is wrong with the others."""
    from rich.text import Text

    from quorate.api.checkpoints import NO_KEY
    from quorate.cli.layout import headed_table

    examined = verified.examined
    if not examined:
        page.line(f"Run {run} has no checkpoint.")
        return
    rows = [
        (
            each.path.name,
            size(each.bytes) if each.bytes else NONE,
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


def _row(each: "CheckpointRecord", now: datetime) -> "tuple[str | Text, ...]":
    from rich.text import Text

    seconds = each.age(now)
    notes = [("damaged", "red")] if each.problem else []
    notes += [("of another run", "red")] if each.foreign else []
    notes += [("encrypted", "dim")] if each.encrypted else []
    return (
        f"{each.named_step:,}" + (" evaluated" if each.name.endswith("-evaluated") else ""),
        size(each.bytes) if each.bytes else NONE,
        NONE if seconds is None else age(seconds),
        ", ".join(f"{name} {measure(value)}" for name, value in each.metrics.items()) or NONE,
        ", ".join(reason.value for reason in each.because) or NONE,
        Text(" ").join(Text(word, style=style) for word, style in notes),
    )
