"""A poison batch: a step that kills every worker that takes it. Whoever is next would die of it as well."""

from collections.abc import Sequence

from quorate.coordinator.autopsy import name_enrolled, what_happened
from quorate.coordinator.events import ExitReported, Reading
from quorate.coordinator.states import Enrolled, Victim
from quorate.core.cursor import Cursor
from quorate.core.failure import POISON_BATCH, Failure, name_samples
from quorate.core.worker_status import COMPUTE, DATA, GAVE_UP

FATAL = 3
"""So many workers may die in the same lane of the same step."""

_WHEN = {DATA: "while its samples were read", COMPUTE: "while its loss was computed"}


def with_victim(
    victims: tuple[Victim, ...], event: ExitReported, known: Enrolled, last_words: str = ""
) -> tuple[Victim, ...]:
    """Those who died in a row in the task's own code at one step, after another death.

    Lanes are told apart later: at a step that kills in every lane, workers die in several of them by turns.
    """
    step, phase, reading = event.place.step, event.place.phase, event.reading
    # Who stops for a symptom has not died of what it read; whose loader has died, has.
    is_symptom = bool(last_words) and event.exit_code != GAVE_UP
    if step is None or reading is None or phase not in _WHEN or is_symptom:
        return ()
    why = f" ({last_words.partition('. ')[0].rstrip('.')})" if last_words else ""
    how = f"{name_enrolled(known)} {what_happened(event)[0]}{why}"
    victim = Victim(event.worker, step, phase, reading, how)
    return (*(before for before in victims if before.step == step), victim)


def not_survived(victims: tuple[Victim, ...], cursor: Cursor) -> tuple[Victim, ...]:
    """Those of a step that nobody has completed since."""
    return tuple(victim for victim in victims if victim.step > cursor.step)


def find_poison(victims: Sequence[Victim]) -> Failure | None:
    """Why to give up: enough have died in the lane that the last one died in."""
    if not victims:
        return None
    last = victims[-1]
    alike = [victim for victim in victims if victim.reading.lane == last.reading.lane]
    return _failure(alike) if len(alike) >= FATAL else None


def _failure(alike: Sequence[Victim]) -> Failure:
    last = alike[-1]
    reading = last.reading
    deaths = "; ".join(f"{victim.how} {_WHEN[victim.phase]}" for victim in alike)
    message = (
        f"step {last.step} (epoch {reading.epoch}) kills every worker that takes its lane {reading.lane}: {deaths}. "
        f"The lane has {_samples(reading)}. Look at these samples and at what the task does with them; mend it or "
        "leave them out. `on_poison: skip` is no remedy: it is for a loss that is not finite."
    )
    return Failure(
        POISON_BATCH,
        message,
        worker=last.worker,
        lane=reading.lane,
        step=last.step,
        phase=last.phase,
        samples=reading.samples,
    )


def _samples(reading: Reading) -> str:
    if not reading.count:
        return "samples that were not told"
    listed = ", of which failure.samples in result.json lists the first" if reading.count > len(reading.samples) else ""
    return f"{name_samples(reading.samples, reading.count)}{listed}"
