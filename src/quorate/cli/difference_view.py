"""Two runs side by side."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.text import Text

from quorate.api.evaluate import Replay, replay
from quorate.cli.layout import headed_table
from quorate.cli.output import NONE, print_document
from quorate.history.difference import Pair, RunPair, RunSide
from quorate.history.documents import difference_document
from quorate.history.timeline import RunPace
from quorate.observe.events import RunBegan
from quorate.observe.quantities import count, duration, measure
from quorate.observe.screen import Screen
from quorate.spec.keys import Absent
from quorate.spec.yaml_document import write_value
from quorate.storage.run_folder import RunFolder

DIGEST_SHOWN = 12
TENSORS_SHOWN = 12


def show_difference(left: RunFolder, right: RunFolder, with_tensors: bool, as_json: bool) -> None:
    """Print how two runs differ; with their tensors, replay the step at which they part."""
    pair = RunPair.read(left, right)
    parting, replayed = pair.comparison.parting, None
    if with_tensors and parting is not None:
        ours, others = ({name: values[side] for name, values in parting.values.items()} for side in (0, 1))
        replayed = replay((pair.left.folder, pair.right.folder), parting.step, (ours, others))
    if as_json:
        print_document(difference_document(pair) | {"replay": None if replayed is None else asdict(replayed)})
    else:
        print_difference(pair, Screen(sys.stdout), replayed)


def print_difference(pair: RunPair, screen: Screen, replayed: Replay | None = None) -> None:
    """Print how two runs differ: verdict first, then what was asked, what came out, and what the bits depend on."""
    names = (pair.left.folder.name, pair.right.folder.name)
    first, second = _result(pair.left), _result(pair.right)
    screen.print(_parting(pair))
    same = pair.weights[0] == pair.weights[1]
    if None in pair.weights:
        screen.print("Their weights cannot be compared: not both of them have ended.")
    else:
        verdict = f"They end with {'the same' if same else 'other'} weights."
        screen.print(Text(verdict, style="green" if same else "yellow"))
    if not same and (why := _why_weights_differ(pair)):
        screen.print(why)
    if replayed is not None:
        _print_replay(screen, replayed)
    tables = {
        "keys": {
            f"{change.key} ({change.mark})": (_value(change.before), _value(change.after)) for change in pair.keys
        },
        "results": {name: (first.get(name, NONE), second.get(name, NONE)) for name in {**first, **second}}
        | {name: _sides(both, measure) for name, both in pair.metrics.items()},
        "logged at the last step": {name: _sides(both, measure) for name, both in pair.logged.items()},
        "environment": {name: _sides(both, lambda value: str(value)[:40]) for name, both in pair.environment.items()},
    }
    for title, rows in tables.items():
        if rows:
            screen.print()
            headed = headed_table((title, *names), rows=[(name, *both) for name, both in rows.items()])
            screen.print(headed)
    if pair.source:
        screen.print("\nThe code of their tasks differs:")
        for text in pair.source:
            screen.print(Text(text, style={"-": "red", "+": "green"}.get(text[:1], "")), soft_wrap=True)
    if not pair.keys:
        screen.print("\nAll keys of their jobs are equal.")


def _lengths(pair: RunPair) -> str:
    """For how many steps each schedule was laid out, where it depends on that and they differ."""
    found = {}
    for side in (pair.left, pair.right):
        if side.job.spec.schedule is None or not side.job.spec.schedule.depends_on_length:
            return ""
        lengths = dict.fromkeys(began.total_steps for began in side.timeline.of_kind(RunBegan))
        found[side.folder.name] = ", then for ".join(f"{length:,}" for length in lengths if length) + " steps"
    differ = len(set(found.values())) > 1
    return "; ".join(f"{name} was laid out for {lengths}" for name, lengths in found.items()) if differ else ""


def _why_weights_differ(pair: RunPair) -> str:
    """Where other weights are no sign of a fault."""
    strategies = [side.job.spec.strategy for side in (pair.left, pair.right)]
    if modes := sorted({str(each.model_dump()["mode"]) for each in strategies if not each.is_synchronous}):
        return (
            f"In mode {' and '.join(modes)} weights depend on which update came first, so that others are no sign of a "
            "fault."
        )
    if gangs := sorted({strategy.kind for strategy in strategies if not strategy.fixes_bits}):
        told = " and ".join(f"strategy: {kind}" for kind in gangs)
        return f"With {told} the last bits depend on how many workers there were at each step."
    lengths = _lengths(pair)
    return f"Their learning rate depends on the length of the job: {lengths}." if lengths else ""


def _parting(pair: RunPair) -> Text:
    common, parting = pair.comparison.common_steps, pair.comparison.parting
    if not common:
        return Text("They have no step in common.", style="yellow")
    if parting is None:
        return Text(f"They do not diverge: loss and gradient norm have the same bits at all {common:,} common steps.")
    values = [f"{name} {both[0]!r} and {both[1]!r}" for name, both in parting.values.items()]
    if parting.lane is not None:
        tensor = "" if parting.tensor is None else f", first in that of '{parting.tensor}'"
        values.insert(0, f"the gradient of lane {parting.lane}{tensor}")
    return Text(f"They diverge at step {parting.step:,}: {'; '.join(values)}.", style="yellow")


def _print_replay(screen: Screen, replayed: Replay) -> None:
    step = f"step {replayed.step:,}"
    for run in replayed.unfaithful:
        screen.print(
            f"Replayed here, run {run} does not give what it recorded: it ran with another processor, library or data."
        )
    if replayed.moment is None:
        screen.print(f"Replayed here, they are equal before and after {step}.")
        return
    earlier = "" if replayed.moment == "before" else f" Before {step} they are equal."
    screen.print(f"Replayed, {len(replayed.tensors)} tensors differ {replayed.moment} {step}.{earlier} The first:")
    for tensor in replayed.tensors[:TENSORS_SHOWN]:
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        told = "another shape or type, or only in one of them"
        if tensor.largest is not None:
            told = f"{tensor.differing:,} of {tensor.elements:,} elements, by {measure(tensor.largest)} at most"
        screen.print(f"  {tensor.name} ({shape}): {told}")
    if (rest := len(replayed.tensors) - TENSORS_SHOWN) > 0:
        screen.print(f"  … and {rest} more; --json has all of them")


def _result(side: RunSide) -> dict[str, str]:
    result = side.result
    shown = {"status": result.get("status", "not ended")}
    if "steps" in result:
        shown["steps"] = f"{result['steps']:,}"
    # Of all parts of a run, as `show` has them: a result knows of the last one only.
    if (pace := RunPace.of(side.timeline)) is not None:
        shown["speed"] = f"{count(pace.samples_per_second)} samples/s"
    if side.timeline.active_seconds:
        shown["training"] = duration(side.timeline.active_seconds)
    shown["weights"] = result.get("weights_digest", "")[:DIGEST_SHOWN]
    return {name: text for name, text in shown.items() if text}


def _value(value: Any) -> str:
    return NONE if value is Absent.NOT_GIVEN else write_value(value)


def _sides(pair: Pair, text: Callable[[Any], str]) -> tuple[str, str]:
    left, right = (NONE if value is None else text(value) for value in pair)
    return left, right
