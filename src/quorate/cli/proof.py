"""The verbs that prove what a run has computed."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.options import RUNS, Json, Runs, TrustJob, group_of_verbs, run_names, to_file
from quorate.cli.output import print_answer
from quorate.core.errors import RequestError
from quorate.storage.run_folder import RunFolder, why_untrusted

key = group_of_verbs("key")


@key.callback()
def keys() -> None:
    """Make keys that sign certificates.

    \b
    Examples:
      quorate key new ~/.ssh/quorate.pem
      quorate key new lab.pem --json
    """


@key.command("new")
def new_key(file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")], as_json: Json = False) -> None:
    """Make an Ed25519 key in a file that only its owner can read, and print its public half.

    \b
    Examples:
      quorate key new ~/.ssh/quorate.pem
      quorate key new lab.pem --json
    """
    from quorate.proof.certificate import make_key

    public = make_key(file.expanduser())
    print_answer(as_json, {"file": str(file.absolute()), "public_key": public}, f"{file}: public key {public}")


def certify(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="A run's name, a unique prefix of it, a path, or last.", autocompletion=run_names
        ),
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key to sign with: quorate key new.")] = None,
    segments: Annotated[int, typer.Option(min=1, metavar="K", help="How many segments to train again.")] = 3,
    all_segments: Annotated[bool, typer.Option("--all", help="Train all of them again.")] = False,
    challenge: Annotated[
        str, typer.Option(metavar="WORD", help="Somebody else's word, on which depends which segments are drawn.")
    ] = "",
    verify: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check this certificate, and RUN against it, and train nothing."),
    ] = None,
    output: Annotated[Path, to_file("The certificate to write.")] = Path("certificate.json"),
    trust_job: TrustJob = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Certify a run: train random segments between its checkpoints again, and sign that they came to the same bits.

    Each segment is trained on another number of workers than the run had. Every step is compared with what the run
    recorded, and the state at its end with the checkpoint. Which segments are drawn depends on all checkpoints and
    events of the run. If a segment differs, no certificate is written, and the exit code is 1.

    \b
    Examples:
      quorate certify last --key lab.pem
      quorate certify digits-0001 --key lab.pem --all -o digits.json
      quorate certify --verify digits.json
      quorate certify digits-0001 --verify digits.json
    """
    from quorate.api.prints import NoDisplay
    from quorate.api.tasks import refuse_others_task
    from quorate.api.train import passing_on_signals, show_quietly
    from quorate.api.warm import WarmRunner
    from quorate.proof.again import Trainer
    from quorate.proof.certificate import certify, problems_of
    from quorate.storage.atomic import write_atomically

    if run is None and verify is None:
        raise RequestError("certify needs the name of a run, or --verify with a certificate.")
    folder = None if run is None else RunFolder.find(runs, run)
    if verify is not None:
        trainer = None if folder is None else Trainer(folder, lambda _: NoDisplay())
        problems = problems_of(verify, trainer)
        _answer(json.loads(verify.read_text()), verify, problems, as_json)
    assert folder is not None
    if key is None:
        raise RequestError("certify signs with a key: --key FILE. `quorate key new FILE` makes one.")
    if not trust_job:
        refuse_others_task(why_untrusted(runs, str(run), folder.path), folder)
    with passing_on_signals(), WarmRunner() as runner:
        count = None if all_segments else segments
        done = certify(Trainer(folder, show_quietly, runner), key.expanduser(), count, challenge)
    problems = [str(each.difference) for each in done.differing]
    if not problems:
        write_atomically(output, json.dumps(done.document, indent=1) + "\n")
    _answer(done.document, None if problems else output, problems, as_json)


def _answer(document: dict[str, Any], file: Path | None, problems: list[str], as_json: bool) -> None:
    segments, of = document["segments"], len(document["run"]["states"])
    name, public = document["run"]["name"], document["public_key"]
    fields = {"run": name, "file": None if file is None else str(file.absolute()), "valid": not problems}
    fields |= {"problems": problems, "segments": segments, "of": of, "public_key": public}
    lines = [f"steps {each['from_step']:,} to {each['to_step']:,} on {each['workers']} workers" for each in segments]
    lines += problems or [f"{file}: {len(segments)} of {of} segments of {name} came to the same bits", f"key {public}"]
    if of <= 3:
        lines.append(f"{of} segments are few: keep more checkpoints along a run (checkpoint.every, checkpoint.keep).")
    print_answer(as_json, fields, "\n".join(lines))
    raise typer.Exit(1 if problems else 0)
