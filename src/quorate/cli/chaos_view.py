"""What became of a job under faults, for people."""

import sys

from rich.text import Text

from quorate.api.chaos import Trial
from quorate.api.documents import phase_of, trial_document
from quorate.api.recorded_run import short_path
from quorate.cli.output import print_document
from quorate.core.generation import name_of
from quorate.history.ledger import Ledger, read_ledger
from quorate.observe.quantities import duration
from quorate.observe.screen import Screen
from quorate.storage.run_folder import RunFolder

_SPANS = {
    "detect_s": "noticed",
    "reform_s": "formed anew",
    "copy_s": "copied",
    "first_step_s": "next step",
    "refill_s": "replaced",
}


def show_trial(trial: Trial, as_json: bool) -> bool:
    """Print what became of a trial; whether it has shown what it is for."""
    ledger = read_ledger(RunFolder(trial.disturbed.folder))
    if as_json:
        print_document(trial_document(trial, ledger))
    else:
        print_trial(trial, ledger, Screen(sys.stdout))
    return succeeded(trial, ledger)


def print_trial(trial: Trial, ledger: Ledger, screen: Screen) -> None:
    """Each fault, each recovery, the samples, and the verdict."""

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


def succeeded(trial: Trial, ledger: Ledger) -> bool:
    """Whether the trial has shown what it is for: every fault came about, and neither bits nor samples are others."""
    return trial.is_same and trial.have_all_fired and ledger.is_whole


def _verdict(trial: Trial, ledger: Ledger) -> str:
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
