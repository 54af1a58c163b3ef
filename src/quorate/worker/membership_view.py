"""Where a worker stands in its job: what its coordinator has declared, and what the worker has promised since."""

import logging
from collections.abc import Callable

from quorate.core.errors import GenerationOver, JobError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Position
from quorate.core.timing import SYSTEM, Runtime
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import decode_failure, decode_generation, decode_id

log = logging.getLogger(__name__)


class JobEnded(JobError):  # noqa: N818 (a happening, not a mistake)
    """The coordinator has ended the job: for somebody's failure, or because it is complete."""

    def __init__(self, failure: Failure | None) -> None:
        self.failure = failure
        super().__init__("the job has ended: " + (failure.message if failure else "it is complete"))


class Dismissed(JobError):  # noqa: N818 (a happening, not a mistake)
    """This worker was asked to leave, and may: the others have all that it had."""


class MembershipView:
    """Heard by one thread, acted on by another."""

    def __init__(self, runtime: Runtime = SYSTEM) -> None:
        self._changed = runtime.condition()
        self._member: tuple[int, str] | None = None
        self._pid = 0
        self._generation: Generation | None = None
        self._left_at: Cursor | None = Cursor()
        # Whether what it holds is the state of the job, and not just a beginning.
        self.has_trained = False
        self._lowest_incarnation = 0
        self._over: GenerationId | None = None
        self._break_at: GenerationId | None = None
        self._save_at: GenerationId | None = None
        # Wishes for a checkpoint that this generation has, and those of them that it has begun to fulfil.
        self._saves_asked: frozenset[str] = frozenset()
        self._saves_begun: frozenset[str] = frozenset()
        self._is_dismissed = False
        self._close_links: Callable[[], None] | None = None
        self.stop_requested: str | None = None
        self.is_asked = False  # whether the coordinator has ever asked for something at a step boundary
        self.ended = False
        self.is_over = False  # its generation, or the job: `check` says which
        self.failure: Failure | None = None

    # --- what the worker does

    def join(self, worker: int, pid: int, address: str, cursor: Cursor) -> None:
        self._member, self._pid, self._left_at = (worker, address), pid, cursor

    def leave(self, cursor: Cursor) -> None:
        """It has left its generation, for good, and stands at a cursor until the next."""
        with self._changed:
            self._left_at = cursor

    def hold_state(self) -> None:
        """It holds the state of the job from now on, and not just a beginning."""
        self.has_trained = True

    def present(self, incarnation: int) -> Position:
        """What to tell a coordinator of this incarnation, which knows nothing.

        From now on a late word of those before it begins no generation, and lets nobody go: the new one goes by what it
        is told here.
        """
        with self._changed:
            self._lowest_incarnation = max(self._lowest_incarnation, incarnation)
            return Position(self._generation, self._left_at or Cursor(), self._left_at is not None, self.has_trained)

    @property
    def generation_name(self) -> str | None:
        """The same for people; None while it has none."""
        return str(self._generation.id) if self._generation else None

    @property
    def generation_id(self) -> GenerationId:
        """Its latest generation; below every other while it has none."""
        return self._generation.id if self._generation else GenerationId(0, 0)

    @property
    def is_lowest_of_host(self) -> bool:
        """Whether it is the one in its latest generation that tells of the machine that it is on."""
        generation, member = self._generation, self._member
        return generation is not None and member is not None and generation.is_lowest_of_host(member[0])

    @property
    def break_requested(self) -> bool:
        """Whether the generation shall end at the next step boundary, to let somebody in or go."""
        return self._generation is not None and self._break_at == self._generation.id

    @property
    def save_requested(self) -> bool:
        """Whether it shall end there with a checkpoint, since nobody who stays holds the state."""
        return self._generation is not None and self._save_at == self._generation.id

    @property
    def save_asked(self) -> bool:
        """Whether somebody wants a checkpoint, and this worker is the one that is to have all others save with it."""
        return bool(self._saves_asked - self._saves_begun)

    def save_begun(self) -> None:
        with self._changed:
            self._saves_begun |= self._saves_asked

    def await_generation(self, after: Generation | None, check: Callable[[], None], pause: float) -> Generation:
        """Wait for one that this worker belongs to, newer than the given one; `check` raises when there is no hope."""
        with self._changed:
            while not self.ended and (self._generation is None or self._generation is after):
                if self._is_dismissed:
                    raise Dismissed("this worker was asked to leave, and may")
                check()
                # A lease moves meanwhile: `check` is asked again.
                self._changed.wait_for(
                    lambda: self.ended or self._is_dismissed or self._generation not in (None, after), pause
                )
            if self.ended or self._generation is None:
                raise JobEnded(self.failure)
            return self._generation

    def check(self) -> None:
        """Raise GenerationOver or JobEnded when this worker may act no longer."""
        if self.ended:
            raise JobEnded(self.failure)
        if self._generation is not None and self._over == self._generation.id:
            raise GenerationOver(f"generation {self._over} is over")

    def close_when_over(self, generation: Generation, close: Callable[[], None]) -> None:
        """Have `close` called when this generation, or the job, is over: by whoever hears of it, or now if it is."""
        with self._changed:
            self._close_links = close
            is_over = self.ended or self._over == generation.id
        if is_over:
            close()

    # --- what the coordinator declares

    def handle(self, directive: pb.Directive) -> None:
        with self._changed:
            what = directive.WhichOneof("what")
            self.is_asked = self.is_asked or what in ("stop", "regroup", "save")
            match what:
                case "formed":
                    self._adopt(decode_generation(directive.formed))
                case "stop":
                    self.stop_requested = directive.stop.reason
                case "regroup":
                    generation = decode_id(directive.regroup.generation)
                    if not directive.regroup.at_boundary:
                        self._over = generation
                    else:
                        self._break_at = generation
                        self._save_at = generation if directive.regroup.saves else self._save_at
                case "save":
                    self._ask_to_save(directive.save)
                case "dismiss":
                    self._dismiss(directive.dismiss)
                case "end":
                    self.failure = decode_failure(directive.end.failure)
                    self.ended = True
            self.is_over = self.ended or (self._generation is not None and self._over == self._generation.id)
            close = self._close_links if self.is_over else None
            self._changed.notify_all()
        if what in ("stop", "save"):
            log.info("asked to %s at the next step boundary", what)
        if close is not None:
            close()

    def _adopt(self, generation: Generation) -> None:
        """Take a generation over that we belong to, unless it is older than ours: a late word of an earlier
        coordinator. One of the time before we came may have had another worker in our place."""
        is_ours = any((member.worker, member.address) == self._member for member in generation.members)
        is_current = generation.id.incarnation >= self._lowest_incarnation
        if not is_current or generation.id <= self.generation_id:
            return
        if not is_ours:
            self.has_trained = False  # the others leave behind what it holds
            return
        if generation.restored is not None:
            self.has_trained = False  # until it has taken up the checkpoint
        self._generation = generation
        self._saves_asked = self._saves_begun = frozenset()  # whoever still waits asks again
        self._left_at = None
        self._close_links = None

    def _dismiss(self, dismiss: pb.DismissDirective) -> None:
        is_us = self._member is not None and (dismiss.worker, dismiss.pid) == (self._member[0], self._pid)
        self._is_dismissed = self._is_dismissed or (is_us and dismiss.incarnation >= self._lowest_incarnation)

    def _ask_to_save(self, save: pb.SaveDirective) -> None:
        """One worker asks the others at a step boundary: if each did when it hears of it, there would be several."""
        if self._generation is None or self._member is None or decode_id(save.generation) != self._generation.id:
            return
        if self._generation.members[0].worker == self._member[0]:
            self._saves_asked |= {save.request}
