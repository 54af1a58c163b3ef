"""Audits: now and then a lane is computed a second time, by another worker where there is one, and compared.

A processor that computes wrongly, or code whose result depends on more than its lane, changes the result of a job
without a trace: the wrong gradient is in every worker's sum, so all replicas stay equal. A difference is settled by
computing the lane again: a worker that is outvoted, or does not repeat its own result, is wrong; where all disagree, it
is the code.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, NoReturn

from quorate.core.cached import cached_property
from quorate.core.digests import content_digest
from quorate.core.errors import LanesDiffer, LanesDisputed, LinkError, UnsupportedModelError
from quorate.core.generation import Member, name_of
from quorate.replica.losses import called
from quorate.training.lane import LaneResult

SETTLE_INDEX, WITHDRAW_INDEX, PART_INDEX = 15, 16, 17
"""What is gathered to settle a difference, beside the other messages of a step."""
MOST_NAMED = 3
"""Parts that a message names as different."""


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
        workers = len(self.hosts)
        if step == self.first and workers > 1:
            return tuple(self._audit(step * workers + position) for position in range(workers))
        return tuple(map(self._audit, range((step - 1) * self._lanes // self.every, step * self._lanes // self.every)))

    def due(self, after: int) -> int:
        """The next step that has any: most have none."""
        if after < self.first and len(self.hosts) > 1:
            return self.first
        return -(-(after * self._lanes // self.every + 1) * self.every // self._lanes)

    @cached_property
    def _lanes(self) -> int:
        return sum(len(hosted) for _, hosted in self.hosts)

    def _audit(self, number: int) -> Audit:
        workers, turn = len(self.hosts), number // len(self.hosts)
        position = number % workers
        owner, hosted = self.hosts[position]
        apart = 1 + turn % (workers - 1) if workers > 1 else 0
        return Audit(hosted[turn % len(hosted)], owner, self.hosts[(position + apart) % workers][0])


@dataclass(frozen=True)
class Outcome:
    """What a lane has computed: `digest` of all that counts, and its `parts` by name, to name those that differ."""

    digest: str
    parts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, result: LaneResult, changed: Mapping[str, str], tensors: Sequence[str] = ()) -> "Outcome":
        """Samples, losses, gradient and `changed` buffers; where `result` has digests of single `tensors`, these are
        parts, too."""
        parts = {"the number of samples": str(result.samples), "which parameters have a gradient": hex(result.present)}
        parts |= {f"the {called(name)}": repr((loss.total, loss.count)) for name, loss in result.losses.items()}
        parts |= {f"buffer '{name}'": digest for name, digest in changed.items()}
        gradient, *single = (f"{each:016x}" for each in result.digests or (0,))
        digest = content_digest(json.dumps([parts, gradient], sort_keys=True).encode())[:16]
        by_tensor = zip(tensors, single, strict=False)  # none where they were not asked for
        return cls(digest, parts | {f"the gradient of '{name}'": each for name, each in by_tensor})


@dataclass(frozen=True)
class Doubt:
    """Two workers have each repeated their own result. The one that stays keeps both until a third computes the lane.
    `clean` is the step until which the `other` was found right."""

    step: int
    lane: int
    worker: int
    own: str
    other: int
    others: str
    clean: int


@dataclass
class AuditRecord:
    """What a worker knows of audits through all generations.

    `clean` is by worker the last step at which a lane of it was found right, or at which it has joined; another process
    in its place may run on the same processor, so that what its predecessor had counts until it was found right itself.
    `floor` is the least of these of all workers that are here, None until it is known. `done` audits were made.
    """

    clean: dict[int, int] = field(default_factory=dict)
    floor: int | None = None
    done: int = 0
    doubt: Doubt | None = None


@dataclass(frozen=True)
class AuditNote:
    """What a worker sends in a step with audits: how far it knows each worker to have been right, and the digests of
    its own lanes and of those that it has audited."""

    clean: Mapping[str, int]
    own: Mapping[str, str]
    seen: Mapping[str, str]
    doubt: Mapping[str, Any] | None = None


class Verdict(NamedTuple):
    """Which workers are wrong. If none is: with `is_open` it takes another result to say, otherwise it is the code."""

    culprits: tuple[int, ...] = ()
    is_open: bool = False


def verdict(found: Mapping[int, Sequence[str]]) -> Verdict:
    """Judge the results of each worker that has computed a lane, which are not all equal."""
    steady = {party: told[0] for party, told in found.items() if len(set(told)) == 1}
    unsteady = tuple(party for party in found if party not in steady)
    if len(found) == 1:
        # Alone: a result that comes out twice is right, and the other was wrong.
        ((party, told),) = found.items()
        return Verdict((party,) if len(set(told)) < len(told) else (), is_open=len(told) == 2)
    counted = Counter(steady.values()).most_common()
    if not counted or len(unsteady) > len(steady):
        return Verdict()
    usual, count = counted[0]
    if count > len(steady) / 2:
        return Verdict((*unsteady, *(party for party, told in steady.items() if told != usual)))
    return Verdict(is_open=len(found) == 2)


@dataclass
class LaneAudit:
    """A member's part in the audits of one generation.

    `due` is the next step that has any; with an open doubt every step has. `compute` computes a lane of the present
    step once more, or gives None where memory runs out. `withdraw` makes sure that nothing that was saved after a step
    is used any more.
    """

    plan: AuditPlan
    own: Member
    members: Sequence[Member]
    record: AuditRecord
    gather: Callable[[int, int, bytes], tuple[bytes, ...]]
    withdraw: Callable[[int], None]
    compute: Callable[[int], Outcome | None] = lambda _: None
    _seen: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.due = self.plan.due(self.plan.first - 1) if self.record.doubt is None else 0

    def lanes(self, step: int) -> tuple[int, ...]:
        """The lanes that this worker audits, before it computes its own."""
        return tuple(dict.fromkeys(each.lane for each in self.plan.audits(step) if each.auditor == self.own.worker))

    def owned(self, step: int) -> tuple[int, ...]:
        """Its own lanes that are audited."""
        return tuple(audit.lane for audit in self.plan.audits(step) if audit.owner == self.own.worker)

    def see(self, lane: int, outcome: Outcome | None) -> None:
        """Keep what the lane of another has come to, for `note`."""
        if outcome is not None:
            self._seen[str(lane)] = outcome.digest

    def note(self, step: int, results: Sequence[LaneResult], changed: Sequence[Mapping[str, str]]) -> AuditNote:
        """What it sends. Lanes without a digest are left out: memory ran out in them, or for the digest."""
        owned, doubt, pairs = self.owned(step), self.record.doubt, zip(results, changed, strict=True)
        own = {
            str(one.lane): Outcome.of(one, each).digest
            for one, each in pairs
            if one.lane in owned and not one.shortage and (one.digests or not one.samples)
        }
        seen, self._seen = self._seen, {}
        clean = {str(worker): until for worker, until in self.record.clean.items()}
        return AuditNote(clean, own, seen, None if doubt is None else asdict(doubt))

    def differing(self, step: int, told: Mapping[int, AuditNote]) -> Audit | Doubt | None:
        """The first doubt or difference, the same on all members; without any, what was compared counts as right."""
        for note in told.values():
            if note.doubt is not None:
                return Doubt(**note.doubt)
        clean = _clean(told)
        for audit in self.plan.audits(step):
            own, seen = told[audit.owner].own.get(str(audit.lane)), told[audit.auditor].seen.get(str(audit.lane))
            if own is None or seen is None:
                continue
            if own != seen:
                return audit
            clean[audit.owner] = step
            self.record.done += 1
        self.record.clean.update(clean)
        self.record.floor = min(clean.values())
        self.due = self.plan.due(step)
        return None

    def settle(self, step: int, differing: Audit | Doubt, told: Mapping[int, AuditNote]) -> NoReturn:
        """Have the lane computed again, and raise what follows from it."""
        lane, clean = differing.lane, _clean(told)
        if isinstance(differing, Doubt):
            first, second = differing.worker, ~differing.other
            found = {first: [differing.own], second: [differing.others]}
            clean[second] = differing.clean
            if differing.step != step or len(told) == 1:
                what = f"No other worker has computed lane {lane} of step {differing.step}, which two disagree on"
                raise self._go_back(step, what, (), min(clean.values()))
        else:
            first, second = differing.owner, differing.auditor
            found = {worker: list[str]() for worker in (first, second)}
            found[first].append(told[first].own[str(lane)])
            found[second].append(told[second].seen[str(lane)])
        third = next((worker for worker in told if worker not in found), first)
        named = self._compute_again(step, lane, found, {first, second, third} & told.keys())
        judged = verdict(found)
        values = "; ".join(f"{_named(party)} {' and '.join(each)}" for party, each in found.items())
        what = f"Lane {lane} of step {step} was computed several times, and not to the same bits: {values}{named}"
        if judged.culprits:
            raise self._go_back(step, what, judged.culprits, min(clean[party] for party in judged.culprits))
        if not judged.is_open:
            raise UnsupportedModelError(
                f"{what}. So it is the code: loss() gives another result for the same lane. It may use a random number "
                "that is not of torch, NumPy or random; a global or a cache that changes; the time, the process or the "
                "order of a set; or, in a loop of one's own, a variable that is carried from a batch to the next."
            )
        if len(told) == 1 or isinstance(differing, Doubt):
            raise self._go_back(step, what, (), min(clean.values()))
        if self.own.worker == second:
            raise LanesDisputed(f"{what[:1].lower()}{what[1:]}. A third has to compute it, in the place of this one.")
        if self.own.worker == first:
            self.record.doubt = Doubt(step, lane, first, found[first][0], second, found[second][0], clean[second])
        self.gather(step, PART_INDEX, b"")  # which breaks when the other is gone
        raise LinkError("a worker that was to leave has not left")

    def _compute_again(self, step: int, lane: int, found: dict[int, list[str]], workers: Collection[int]) -> str:
        """Add the results of these workers, as far as their memory suffices, and say which parts of them differ."""
        own, is_alone = self.compute(lane) if self.own.worker in workers else None, len(self.members) == 1
        payload = b"" if own is None else json.dumps(asdict(own)).encode()
        payloads = (payload,) if is_alone else self.gather(step, SETTLE_INDEX, payload)
        pairs = zip(self.members, payloads, strict=True)
        told = {member.worker: Outcome(**json.loads(content)) for member, content in pairs if content}
        for worker, outcome in told.items():
            found.setdefault(worker, []).append(outcome.digest)
        further = self.compute(lane) if is_alone else None  # only to have two in parts
        return _differing_parts([one.parts for one in (*told.values(), further) if one is not None])

    def _go_back(self, step: int, what: str, culprits: Sequence[int], clean: int) -> LanesDiffer:
        """The first report of it has all workers replaced: by then none of them may save what is wrong."""
        self.withdraw(clean)
        if len(self.members) > 1:
            with suppress(LinkError):  # a member that is gone saves nothing
                self.gather(step, WITHDRAW_INDEX, b"")
                self.withdraw(clean)  # what another had all but saved then is there now
        named = " and ".join(map(_named, culprits))
        wrong = f"{named} {'is' if len(culprits) == 1 else 'are'} wrong" if culprits else "nobody can say who is wrong"
        told = f"{what}; {wrong}. Nothing that was saved after step {clean} is used any more."
        return LanesDiffer(told, [party for party in culprits if party >= 0])


def _clean(told: Mapping[int, AuditNote]) -> dict[int, int]:
    """How far each worker is known to have been right, by whoever knows the least."""
    return {
        worker: min(note.clean[str(worker)] for note in told.values() if str(worker) in note.clean) for worker in told
    }


def _differing_parts(outcomes: Sequence[Mapping[str, str]]) -> str:
    names = dict.fromkeys(name for parts in outcomes for name in parts)
    differ = [name for name in names if len({parts.get(name) for parts in outcomes}) > 1]
    more = f" and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
    return f" ({', '.join(differ[:MOST_NAMED])}{more} {'differ' if len(differ) > 1 else 'differs'})" if differ else ""


def _named(party: int) -> str:
    return name_of(party) if party >= 0 else f"the {name_of(~party)} that was replaced"
