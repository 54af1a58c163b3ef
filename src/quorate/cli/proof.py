"""The verbs that prove what a run has computed, and look at one step of it."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from quorate.cli.options import RUNS, Json, Run, Runs, TrustJob, group_of_verbs, run_names, to_file
from quorate.cli.output import print_answer
from quorate.core.errors import RequestError
from quorate.storage.run_folder import RunFolder, why_untrusted

FEW = 3
Step = Annotated[int, typer.Option("--step", min=1, metavar="N", help="The step.")]
key = group_of_verbs("key")


@key.callback()
def keys() -> None:
    """Make keys that sign certificates.

    \b
    Examples:
      quorate key new lab.key
      quorate key new ~/.ssh/quorate --json
    """


@key.command("new")
def new_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")], as_json: Json = False
) -> None:
    """Make an Ed25519 key in a file that only its owner can read, and print its public half.

    \b
    Examples:
      quorate key new lab.key
      quorate key new ~/.ssh/quorate --json
    """
    from quorate.proof.certificate import make_key

    public = make_key(file.expanduser())
    print_answer(as_json, {"file": str(file.absolute()), "public_key": public}, f"{file}: public key {public}")


def certify(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The run.", autocompletion=run_names)] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key to sign with.")] = None,
    segments: Annotated[int, typer.Option(min=1, metavar="K", help="How many segments to train again.")] = 3,
    all_segments: Annotated[bool, typer.Option("--all", help="Train all of them again.")] = False,
    challenge: Annotated[
        str, typer.Option(metavar="WORD", help="Somebody else's word: which segments are drawn depends on it, too.")
    ] = "",
    verify: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check this certificate, and RUN against it; train nothing.")
    ] = None,
    signer: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="With --verify: the public key it must be signed with, or its file."),
    ] = None,
    output: Annotated[Path | None, to_file("The certificate to write; by default certificate.json.")] = None,
    trust_job: TrustJob = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Certify a run: train random segments between its checkpoints again, and sign that the bits were the same.

    Each segment runs on a number of workers that the run did not have. Every step is compared with what the run
    recorded, and the state at its end with the checkpoint. If one differs, no certificate is written, and the exit
    code is 1.

    \b
    Examples:
      quorate certify last --key lab.key
      quorate certify digits-0001 --key lab.key --all -o digits.json
      quorate certify digits-0001 --verify digits.json --signer lab.pub
    """
    if verify is not None:
        if key or all_segments or challenge or output:
            raise RequestError("--verify trains and writes nothing: leave out --key, --all, --challenge and --output.")
        _verify(verify, None if run is None else RunFolder.find(runs, run), signer, as_json)
    if run is None:
        raise RequestError("certify needs a run; or --verify with a certificate, with or without a run.")
    folder, output = trusted(runs, run, trust_job), output or Path("certificate.json")
    if key is None or signer is not None:
        raise RequestError(
            "certify needs --key FILE, and --signer is for --verify. `quorate key new FILE` makes a key."
        )
    if os.path.lexists(output) or not output.parent.is_dir():
        raise RequestError(f"{output} is already there, or its folder is not. Write to another file with -o.")
    _certify(folder, key, None if all_segments else segments, challenge, output, as_json)


def _verify(file: Path, folder: RunFolder | None, signer: str | None, as_json: bool) -> NoReturn:
    from quorate.api.train import show_quietly
    from quorate.proof.again import Trainer
    from quorate.proof.certificate import problems_of, public_key

    trainer = None if folder is None else Trainer(folder, show_quietly)
    document, problems = problems_of(file, trainer, None if signer is None else public_key(signer))
    _answer(document, file, problems, as_json)


def _certify(folder: RunFolder, key: Path, count: int | None, challenge: str, output: Path, as_json: bool) -> None:
    from quorate.api.train import passing_on_signals, show_quietly
    from quorate.api.warm import WarmRunner
    from quorate.proof.again import Trainer
    from quorate.proof.certificate import certify, write_certificate

    with passing_on_signals(), WarmRunner() as runner:
        document, found = certify(Trainer(folder, show_quietly, runner), key.expanduser(), count, challenge)
    problems = [str(each.difference) for each in found if each.difference is not None]
    if not problems:
        write_certificate(document, output)
    _answer(document, None if problems else output, problems, as_json)


def trusted(runs: Path, reference: str, trust_job: bool) -> RunFolder:
    """The run that is meant, whose task is going to be loaded."""
    from quorate.api.tasks import refuse_others_task

    folder = RunFolder.find(runs, reference)
    if not trust_job:
        refuse_others_task(why_untrusted(runs, reference, folder.path), folder)
    return folder


def _answer(document: dict[str, Any], file: Path | None, problems: list[str], as_json: bool) -> NoReturn:
    about, segments = document["run"], document["segments"]
    of, covers = len(about["states"]), {name: about[name] for name in ("covered", "recorded_to", "left_out")}
    name, public = about["name"], document["public_key"]
    fields = {"run": name, "file": file and str(file.absolute()), "problems": problems, "segments": segments, "of": of}
    lines = [f"steps {each['from_step']:,} to {each['step']:,} on {each['workers']} workers" for each in segments]
    if about["covered"] < about["recorded_to"]:
        lines.append(f"Steps {about['covered'] + 1:,} to {about['recorded_to']:,} are not covered.")
    if document["others"]:
        lines.append(f"Trained again with other {' and '.join(document['others'])}.")
    lines += [f"{left} {why}, so it is not covered." for left, why in about["left_out"].items()]
    if not about["identity"]["data"].startswith("proven"):
        lines.append("The data are unproven: their identity is not of every byte.")
    lines += problems or [f"{file}: {len(segments)} of {of} segments of {name} came to the same bits. Key {public}"]
    if of <= FEW:
        lines.append(f"The run has few segments, {of}: keep checkpoints along it (checkpoint.every, checkpoint.keep).")
    print_answer(as_json, {**fields, **covers, "public_key": public}, "\n".join(lines))
    raise typer.Exit(1 if problems else 0)


def recreate(
    run: Run,
    step: Step,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes to run on. By default as many as fit here.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="The run to make.", show_default="RUN-step-N"),
    ] = None,
    trust_job: TrustJob = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Recreate the exact state of any step, also of one that no checkpoint was kept of.

    The run is trained again from the nearest checkpoint before the step, or from the start, and compared with what it
    recorded. The result is a run of its own with a checkpoint of the step, to be exported, evaluated or resumed. If
    something differs, the first such step is printed, and the exit code is 1.

    \b
    Examples:
      quorate checkpoints recreate last --step 150
      quorate checkpoints recreate digits-0001 --step 150 --workers 2 -o digits-at-150
    """
    from quorate.api.recorded_run import short_path
    from quorate.api.train import passing_on_signals, show_on_stderr
    from quorate.proof.again import Trainer, recreate

    folder = trusted(runs, run, trust_job)
    with passing_on_signals():
        again = recreate(Trainer(folder, show_on_stderr), step, output, workers)
    told = f"{short_path(again.run.path)}: step {step:,} of {folder.name}, from step {again.from_step:,} on "
    told += f"{again.workers} workers\nstate {again.state_digest}\n"
    told += str(again.difference or f"{again.compared:,} steps are as the run recorded them.")
    print_answer(as_json, {"run": folder.name, **asdict(again)}, told)
    raise typer.Exit(0 if again.difference is None else 1)


def replay(
    run: Run,
    step: Step,
    debug: Annotated[
        bool, typer.Option("--pdb", help="Stop in the debugger: at the exception, or else in loss() of each lane.")
    ] = False,
    trust_job: TrustJob = False,
    runs: Runs = RUNS,
) -> None:
    """Do one step of a run again in one process, to look at it in a debugger; also the step that failed.

    The state before the step is recreated first. Then the step runs in this process, lane by lane, prints what loss()
    gives, and is compared with what the run recorded. The exit code is 1 if it fails or differs.

    \b
    Examples:
      quorate replay last --step 150
      quorate replay digits-0001 --step 150 --pdb
    """
    from quorate.api.debug import restart_as_worker
    from quorate.api.train import passing_on_signals, show_quietly
    from quorate.proof.again import Trainer
    from quorate.proof.replay import replay

    folder = trusted(runs, run, trust_job)
    restart_as_worker()
    with passing_on_signals():
        again = replay(Trainer(folder, show_quietly), step, _tell_lane, debug=debug)
    print(again.difference or f"step {step:,}: {'as recorded' if again.compared else 'not recorded'}")
    raise typer.Exit(0 if again.difference is None else 1)


def _tell_lane(lane: int, loss: Any) -> None:
    """What loss() gives: a tensor, a sum and a count, or that for each optimizer."""
    for each in loss.values() if isinstance(loss, dict) else [loss]:
        mean = each[0] / each[1] if isinstance(each, tuple) else each
        print(f"lane {lane}: loss {float(mean.detach().mean()):.9g}", flush=True)
