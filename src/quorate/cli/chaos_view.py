"""What became of a job under faults, for people and for programs."""

from typing import Any, TextIO

from rich.text import Text

from quorate.api.chaos import Trial
from quorate.api.remains import near
from quorate.api.result import Result
from quorate.chaos.fault import PHASES, Firing
from quorate.history.ledger import Ledger
from quorate.observe.quantities import duration
from quorate.observe.screen import Screen

_NAMES = {told: name for name, told in PHASES.items()}
_SPANS = {
    "detect_s": "noticed",
    "reform_s": "formed anew",
    "copy_s": "copied",
    "first_step_s": "next step",
    "refill_s": "replaced",
}


def to_document(trial: Trial, ledger: Ledger) -> dict[str, Any]:
    """All of it."""
    return {
        "undisturbed_run": trial.undisturbed.run,
        "undisturbed_digest": trial.undisturbed.weights_digest,
        "run": trial.disturbed.run,
        "folder": str(trial.disturbed.folder),
        "status": "complete" if trial.failure is None else "failed",
        "steps": trial.disturbed.steps,
        "digest": None if trial.failure else trial.disturbed.weights_digest,
        "same": trial.is_same,
        "failure": None if trial.failure is None else trial.failure.to_dict(),
        "differing_facts": list(trial.differing_facts),
        "ledger_whole": ledger.is_whole,
        "faults": [_fault_document(trial, number) for number in range(len(trial.faults))],
        "recoveries": recoveries_of(trial.disturbed),
    }


def recoveries_of(result: Result) -> list[dict[str, Any]]:
    """What a run has recovered from."""
    recoveries: list[dict[str, Any]] = result.fields.get("recoveries") or []
    return recoveries


def print_trial(trial: Trial, ledger: Ledger, stream: TextIO, is_terminal: bool, width: int | None = None) -> None:
    """Each fault, each recovery, the samples, and the verdict."""
    screen = Screen(stream, is_terminal, width)

    def say(text: str, style: str = "") -> None:
        # Never broken by us: a digest or a fault that is copied must be in one piece.
        screen.print(Text(text, style), soft_wrap=True)

    say("faults", "bold")
    column = max(len(str(fault)) for fault in trial.faults) + 2
    for number, fault in enumerate(trial.faults):
        say(f"  {fault!s:<{column}}{_fate(_met(trial, number))}")
    say("recoveries", "bold")
    for recovery in recoveries_of(trial.disturbed):
        say(f"  {_recovery(recovery)}")
    if not recoveries_of(trial.disturbed):
        say("  none")
    say("weights", "bold")
    say(f"  {trial.undisturbed.weights_digest}  {trial.undisturbed.run}, undisturbed")
    if trial.failure is None:
        say(f"  {trial.disturbed.weights_digest}  {trial.disturbed.run}, under faults")
    say("samples", "bold")
    say(f"  {ledger.verdict}", "" if ledger.is_whole else "red")
    say(_verdict(trial, ledger), "bold green" if succeeded(trial, ledger) else "bold red")
    if trial.failure is not None:
        say(f"logs: {near(trial.disturbed.folder / 'logs')}")


def succeeded(trial: Trial, ledger: Ledger) -> bool:
    """Whether the trial has shown what it is for: every fault came about, and neither bits nor samples are others."""
    return trial.is_same and trial.have_all_fired and ledger.is_whole


def _met(trial: Trial, number: int) -> list[Firing]:
    return [firing for firing in trial.firings if firing.fault == number]


def _fate(met: list[Firing]) -> str:
    if not met:
        return "not fired"
    return "fired: " + ", ".join(f"{_who(one)}at step {one.step} in {_phase(one)}" for one in met)


def _who(firing: Firing) -> str:
    return "" if firing.worker is None else f"worker {firing.worker} "


def _phase(firing: Firing) -> str:
    return _NAMES.get(firing.phase, firing.phase)


def _recovery(recovery: dict[str, Any]) -> str:
    spans = [
        f"{word} {duration(recovery[key])}"
        for key, word in _SPANS.items()
        if isinstance(recovery.get(key), int | float)
    ]
    return f"step {recovery.get('step')}, worker {recovery.get('worker')}: {', '.join(spans) or recovery.get('cause')}"


def _verdict(trial: Trial, ledger: Ledger) -> str:
    if trial.failure is not None:
        return f"failed: {trial.failure.message}"
    if not trial.is_same:
        facts = (
            f"; these differ between the runs too: {', '.join(trial.differing_facts)}" if trial.differing_facts else ""
        )
        compare = f"quorate diff {trial.undisturbed.run} {trial.disturbed.run}"
        return f"DIFFERENT: the faults have changed the weights{facts}. See where: {compare}"
    if not ledger.is_whole:
        return f"same weights, but the ledger is broken. See where: quorate show {trial.disturbed.run} --ledger"
    missing = sum(not _met(trial, number) for number in range(len(trial.faults)))
    if missing:
        count = "one of the faults" if missing == 1 else f"{missing} of the faults"
        return (
            f"same weights, but {count} did not come about: its worker was away until the end, or its phase never came"
        )
    return "same: the faults have not changed a bit"


def _fault_document(trial: Trial, number: int) -> dict[str, Any]:
    fault, met = trial.faults[number], _met(trial, number)
    return {
        "fault": str(fault),
        "fired": bool(met),
        "firings": [{"worker": one.worker, "pid": one.pid, "step": one.step, "phase": _phase(one)} for one in met],
    }
