"""`quorate chaos`: a job under faults, and what became of it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quorate.cli.options import Epochs, JobFile, Json, NewRuns, Quiet, Set, Steps, Workers, job_of, run_names
from quorate.cli.output import print_document
from quorate.core.generation import name_of
from quorate.observe.quantities import duration
from quorate.storage.run_folder import RunFolder

if TYPE_CHECKING:  # torch and rich, which a help text does without
    from quorate.api.chaos import Trial
    from quorate.history.ledger import Ledger
    from quorate.observe.screen import Screen

_SPANS = {
    "detect_s": "noticed",
    "reform_s": "formed anew",
    "copy_s": "copied",
    "first_step_s": "next step",
    "refill_s": "replaced",
}


def chaos(
    job_file: JobFile,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="FAULT", help='A fault, such as "kill worker 1 at step 20". Repeatable.'),
    ] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with one fault per line; # is a comment.")
    ] = None,
    at_random: Annotated[bool, typer.Option("--random", help="Draw faults at random, by --mtbf and --seed.")] = False,
    mtbf: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="With --random: mean time between two faults, such as 20steps or 5s (a step counts for 50 ms).",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="With --random: the seed. The same seed gives the same faults."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="A complete run of the job to compare with, instead of running it undisturbed.",
            autocompletion=run_names,
        ),
    ] = None,
    workers: Workers = None,
    steps: Steps = None,
    epochs: Epochs = None,
    settings: Set = None,
    runs: NewRuns = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a job while injecting faults, and compare the weights with those of an undisturbed run.

    A fault fires at the beginning of a step, or with `in PHASE` in a phase of it: data, forward, exchange, apply,
    evaluation or checkpoint; or copy or join, when a worker copies the state or joins the others after an earlier
    fault. If the worker is not running or the phase does not occur at that step, the fault fires at the next
    opportunity. `after 5ms` delays it by that time.

    Faults can kill, stop or slow down a worker, ask it to leave (term), cut it off from the network (as root), add or
    remove a worker, and kill the coordinator or the launcher. The exit code is 0 if every fault fired, both runs end
    with the same weights, and every sample was used exactly once per epoch; otherwise 1.

    \b
    Examples:
      quorate chaos job.yaml --fault "kill worker 1 at step 20"
      quorate chaos job.yaml --fault "stop worker 0 at step 15 for 3s"
      quorate chaos job.yaml --fault "kill worker 1 at step 9 in exchange"
      quorate chaos job.yaml --fault "kill worker 1 at step 9 after 5ms"
      quorate chaos job.yaml --fault "slow worker 1 4x from step 10"
      quorate chaos job.yaml --fault "kill all at step 40" --against last
      quorate chaos job.yaml --fault "kill coordinator at step 30"
      quorate chaos job.yaml --fault "kill launcher at step 40 in checkpoint"
      quorate chaos job.yaml --fault "term worker 1 at step 5"
      quorate chaos job.yaml --fault "add worker at step 12"
      quorate chaos job.yaml --fault "cut worker 2 at step 10 for 8s"
      quorate chaos job.yaml --random --mtbf 5s --seed 7
    """
    from quorate.api.chaos import FaultRequest, Trial, try_under
    from quorate.api.train import show_on_stderr, show_quietly
    from quorate.history.ledger import read_ledger
    from quorate.observe.screen import Screen

    request = FaultRequest.of(fault, script, at_random, mtbf, seed)
    resolved = job_of(job_file, settings, workers=workers, steps=steps, epochs=epochs, runs=runs)
    trial = try_under(request, resolved, against, show_quietly if quiet else show_on_stderr)
    if not isinstance(trial, Trial):
        if as_json:
            error = f"{trial.status} before there was something to compare"
            print_document({"status": trial.status, "exit_code": trial.exit_code, "error": error})
        else:
            print(trial.status, file=sys.stderr)
        raise typer.Exit(trial.exit_code)
    ledger = read_ledger(RunFolder(trial.disturbed.folder))
    if as_json:
        print_document(trial.document(ledger))
    else:
        print_trial(trial, ledger, Screen(sys.stdout))
    raise typer.Exit(0 if succeeded(trial, ledger) else 1)


def print_trial(trial: "Trial", ledger: "Ledger", screen: "Screen") -> None:
    """Each fault, each recovery, the samples, and the verdict."""
    from rich.text import Text

    from quorate.api.chaos import phase_of
    from quorate.api.recorded_run import short_path

    def say(text: str, style: str = "") -> None:
        # Never broken by us: a digest or a fault that is copied must be in one piece.
        screen.print(Text(text, style), soft_wrap=True)

    say("faults", "bold")
    column = max(len(str(fault)) for fault in trial.faults) + 2
    for number, fault in enumerate(trial.faults):
        moments = [
            f"{'' if one.worker is None else f'{name_of(one.worker)} '}at step {one.step} in {phase_of(one)}"
            for one in trial.firings_of(number)
        ]
        fired = ", ".join(moments)
        say(f"  {fault!s:<{column}}{f'fired: {fired}' if fired else 'not fired'}")
    say("recoveries", "bold")
    for each in trial.disturbed.recoveries:
        spans = [f"{word} {duration(each[key])}" for key, word in _SPANS.items() if each.get(key) is not None]
        say(f"  step {each.get('step')}, {name_of(each.get('worker'))}: {', '.join(spans) or each.get('cause')}")
    if not trial.disturbed.recoveries:
        say("  none")
    say("weights", "bold")
    say(f"  {trial.undisturbed.weights_digest}  {trial.undisturbed.run}, undisturbed")
    if trial.failure is None:
        say(f"  {trial.disturbed.weights_digest}  {trial.disturbed.run}, under faults")
    say("samples", "bold")
    say(f"  {ledger.verdict}", "" if ledger.is_whole else "red")
    say(_verdict(trial, ledger), "bold green" if succeeded(trial, ledger) else "bold red")
    if trial.failure is not None:
        say(f"logs: {short_path(trial.disturbed.folder / 'logs')}")


def succeeded(trial: "Trial", ledger: "Ledger") -> bool:
    """Whether the trial has shown what it is for: every fault came about, and neither bits nor samples are others."""
    return trial.is_same and trial.have_all_fired and ledger.is_whole


def _verdict(trial: "Trial", ledger: "Ledger") -> str:
    if trial.failure is not None:
        return f"failed: {trial.failure.message}"
    if not trial.is_same:
        if not trial.promises_bits:
            return f"DIFFERENT: other samples were used. See where: quorate show {trial.disturbed.run} --ledger"
        facts = (
            f"; these differ between the runs too: {', '.join(trial.differing_facts)}" if trial.differing_facts else ""
        )
        compare = f"quorate diff {trial.undisturbed.run} {trial.disturbed.run}"
        return f"DIFFERENT: the faults have changed the weights{facts}. See where: {compare}"
    if not ledger.is_whole:
        return f"same weights, but the ledger is broken. See where: quorate show {trial.disturbed.run} --ledger"
    missing = sum(not trial.firings_of(number) for number in range(len(trial.faults)))
    if missing:
        count = "one of the faults" if missing == 1 else f"{missing} of the faults"
        return f"same weights, but {count} did not happen: its worker was away until the end, or its phase never came"
    is_bitwise, without_bits = "same: the faults have not changed a bit", "same samples; bits depend on timing here"
    return is_bitwise if trial.promises_bits else without_bits
