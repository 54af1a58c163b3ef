"""Audits: now and then a lane is computed a second time, by another worker where there is one, and compared.

A processor that computes wrongly now and then, or code whose result depends on more than its lane, changes what a job
produces without a trace: the wrong gradient is in everybody's sum, so that all replicas stay equal. What an audit finds
is settled by further computations of the same lane: who is outvoted, or does not repeat itself, is wrong; where nobody
agrees with anybody, it is the code.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from quorate.core.digests import content_digest
from quorate.core.errors import LanesDiffer, LanesDisputed, LinkError, UnsupportedModelError
from quorate.core.generation import Member, name_of
from quorate.training.lane import LaneResult

SETTLE_INDEX, WITHDRAW_INDEX, PART_INDEX = 15, 16, 17
"""They tell what is gathered to settle a difference from what else is."""


class Audit(NamedTuple):
    """A lane of the `owner` is computed by the `auditor`, too; both are workers."""

    lane: int
    owner: int
    auditor: int


@dataclass(frozen=True)
class AuditPlan:
    """Which lanes of a step are audited, and by whom: one lane in `every`, each worker's in turn.

    In the first step of a generation one of each worker is, so that whoever joins is looked at at once. A worker that
    is alone audits itself.
    """

    every: int
    hosts: Sequence[tuple[int, range]]
    first: int

    def audits(self, step: int) -> tuple[Audit, ...]:
        workers, lanes = len(self.hosts), sum(len(hosted) for _, hosted in self.hosts)
        if step == self.first and workers > 1:
            return tuple(self._audit(step * workers + position) for position in range(workers))
        return tuple(map(self._audit, range((step - 1) * lanes // self.every, step * lanes // self.every)))

    def _audit(self, number: int) -> Audit:
        workers, turn = len(self.hosts), number // len(self.hosts)
        position = number % workers
        owner, hosted = self.hosts[position]
        apart = 1 + turn % (workers - 1) if workers > 1 else 0
        return Audit(hosted[turn % len(hosted)], owner, self.hosts[(position + apart) % workers][0])


@dataclass(frozen=True)
class Doubt:
    """Two workers have each repeated their own result: the one that is left remembers both until a third is there."""

    step: int
    lane: int
    worker: int
    own: str
    other: int
    others: str
    clean: int


@dataclass
class AuditRecord:
    """What a worker knows of audits through all generations: how many it has seen, the last step at which a lane of its
    own was found right or, before that, the one that it has joined at; and the least of these of all workers."""

    clean: int | None = None
    floor: int | None = None
    done: int = 0
    doubt: Doubt | None = None


@dataclass(frozen=True)
class AuditNote:
    """What a worker tells in a step with audits: what it has come to in its own lanes, and in those of others."""

    clean: int
    own: Mapping[str, str]
    seen: Mapping[str, str]
    doubt: Mapping[str, Any] | None = None


def outcome_of(result: LaneResult, changed: Mapping[str, str]) -> str:
    """All that a lane has computed, in few digits: gradient, losses and the buffers that it has changed."""
    losses = {name: [repr(loss.total), repr(loss.count)] for name, loss in result.losses.items()}
    told = [result.samples, hex(result.present), losses, result.digests[:1], changed]
    return content_digest(json.dumps(told, sort_keys=True).encode())[:16]


class Verdict(NamedTuple):
    """Who is wrong, as far as anybody is; `is_open`: a third has to compute it. Neither: nobody agrees with anybody."""

    culprits: tuple[int, ...] = ()
    is_open: bool = False


def verdict(found: Mapping[int, Sequence[str]]) -> Verdict:
    """Of those who have computed a lane and what each has come to, every time: they do not all agree."""
    steady = {party: told[0] for party, told in found.items() if len(set(told)) == 1}
    unsteady = tuple(party for party in found if party not in steady)
    if len(found) == 1:
        # Alone: what comes out twice is right, and once it was not.
        ((party, told),) = found.items()
        return Verdict((party,) if len(set(told)) < len(told) else ())
    counted = Counter(steady.values()).most_common()
    if not counted or len(unsteady) > len(steady):
        return Verdict()
    usual, count = counted[0]
    if count > len(steady) / 2:
        return Verdict((*unsteady, *(party for party, told in steady.items() if told != usual)))
    return Verdict(is_open=len(found) == 2)


@dataclass
class LaneAudit:
    """A member's part in the audits of one generation. `compute` has it compute a lane of the present step once more;
    `withdraw` sees to it that nothing that was saved after a step is used any more."""

    plan: AuditPlan
    own: Member
    members: Sequence[Member]
    record: AuditRecord
    gather: Callable[[int, int, bytes], tuple[bytes, ...]]
    withdraw: Callable[[int], None]
    compute: Callable[[int], str] = lambda _: ""
    seen: dict[str, str] = field(default_factory=dict)

    def is_due(self, step: int) -> bool:
        return bool(self.plan.audits(step))

    def lanes(self, step: int) -> tuple[int, ...]:
        """What this worker computes for others, before its own lanes."""
        return tuple(audit.lane for audit in self.plan.audits(step) if audit.auditor == self.own.worker)

    def owned(self, step: int) -> tuple[int, ...]:
        """Its own lanes that are audited."""
        return tuple(audit.lane for audit in self.plan.audits(step) if audit.owner == self.own.worker)

    def note(self, step: int, results: Sequence[LaneResult], changed: Sequence[Mapping[str, str]]) -> AuditNote:
        """What it tells; of a lane in which memory ran out there is nothing."""
        owned, doubt, pairs = self.owned(step), self.record.doubt, zip(results, changed, strict=True)
        own = {str(one.lane): outcome_of(one, each) for one, each in pairs if one.lane in owned and not one.shortage}
        seen, self.seen = self.seen, {}
        return AuditNote(self.record.clean or 0, own, seen, None if doubt is None else asdict(doubt))

    def differing(self, step: int, told: Mapping[int, AuditNote]) -> Audit | Doubt | None:
        """The first that is not as it should be. All members find the same."""
        for note in told.values():
            if note.doubt is not None:
                return Doubt(**note.doubt)
        audits = self.plan.audits(step)
        for audit in audits:
            own, seen = told[audit.owner].own.get(str(audit.lane)), told[audit.auditor].seen.get(str(audit.lane))
            if None not in (own, seen) and own != seen:
                return audit
        clean = {worker: note.clean for worker, note in told.items()} | {audit.owner: step for audit in audits}
        self.record.done += len(audits)
        self.record.clean, self.record.floor = clean.get(self.own.worker), min(clean.values())
        return None

    def settle(self, step: int, differing: Audit | Doubt, told: Mapping[int, AuditNote]) -> None:
        """Have the lane computed again, and raise what follows from it."""
        lane, clean = differing.lane, {worker: note.clean for worker, note in told.items()}
        if isinstance(differing, Doubt):
            first, second = differing.worker, ~differing.other
            found = {first: [differing.own], second: [differing.others]}
            clean[second] = differing.clean
            if differing.step != step or len(told) == 1:
                what = f"Nobody was there to compute lane {lane} of step {differing.step} a third time"
                raise self._go_back(step, what, (), min(clean.values()))
        else:
            first, second = differing.owner, differing.auditor
            found = {worker: list[str]() for worker in (first, second)}
            found[first].append(told[first].own[str(lane)])
            found[second].append(told[second].seen[str(lane)])
        third = next((worker for worker in told if worker not in found), first)
        self._compute_again(step, lane, found, {first, second, third} & told.keys())
        judged = verdict(found)
        values = "; ".join(f"{_named(party)} {' and '.join(each)}" for party, each in found.items())
        what = f"Lane {lane} of step {step} was computed several times, and not to the same bits: {values}"
        if judged.culprits:
            raise self._go_back(step, what, judged.culprits, min(clean[party] for party in judged.culprits))
        if not judged.is_open:
            raise UnsupportedModelError(
                f"{what}. So it is the code: loss() gives another result for the same lane. It may use a random number "
                "that is not of torch, NumPy or random; a global or a cache that changes; the time, the process or the "
                "order of a set; or, in a loop of one's own, a variable that is carried from a batch to the next."
            )
        if self.own.worker == second:
            raise LanesDisputed(f"{_lower(what)}. A third has to compute it, in the place of this one.")
        if self.own.worker == first:
            self.record.doubt = Doubt(step, lane, first, found[first][0], second, found[second][0], clean[second])
        self.gather(step, PART_INDEX, b"")  # which breaks when the other is gone
        raise LinkError("a worker that was to leave has not left")

    def _compute_again(self, step: int, lane: int, found: dict[int, list[str]], workers: Collection[int]) -> None:
        own = self.compute(lane).encode() if self.own.worker in workers else b""
        payloads = (own,) if len(self.members) == 1 else self.gather(step, SETTLE_INDEX, own)
        for member, payload in zip(self.members, payloads, strict=True):
            if member.worker in workers:
                found.setdefault(member.worker, []).append(payload.decode())

    def _go_back(self, step: int, what: str, culprits: Sequence[int], clean: int) -> LanesDiffer:
        """Whoever hears of it first has all replaced: by then nobody may save any more what is wrong."""
        self.withdraw(clean)
        if len(self.members) > 1:
            with suppress(LinkError):  # whoever is gone saves nothing
                self.gather(step, WITHDRAW_INDEX, b"")
        named = " and ".join(map(_named, culprits))
        wrong = f"{named} {'is' if len(culprits) == 1 else 'are'} wrong" if culprits else "nobody can say who is wrong"
        told = f"{what}; {wrong}. Nothing that was saved after step {clean} is used any more."
        return LanesDiffer(told, [max(party, ~party) for party in culprits])


def _named(party: int) -> str:
    return name_of(party) if party >= 0 else f"the {name_of(~party)} that was replaced"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
