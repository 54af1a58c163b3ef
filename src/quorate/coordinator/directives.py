"""What the coordinator declares to its workers, for as long as it matters."""

from quorate.coordinator.actions import Action, DeclareGeneration, Dismiss, Regroup, RelayStop
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.codec import encode_generation, encode_id


def directive_of(action: Action, incarnation: int) -> pb.Directive | None:
    """What a coordinator tells the workers for an action, if anything."""
    match action:
        case DeclareGeneration(generation):
            return pb.Directive(formed=encode_generation(generation))
        case RelayStop(reason):
            return pb.Directive(stop=pb.StopDirective(reason=reason))
        case Regroup(generation, at_boundary, saves):
            regroup = pb.RegroupDirective(generation=encode_id(generation), at_boundary=at_boundary, saves=saves)
            return pb.Directive(regroup=regroup)
        case Dismiss(worker, pid):
            return pb.Directive(dismiss=pb.DismissDirective(worker=worker, pid=pid, incarnation=incarnation))
    return None


class Directives:
    """Numbered in their order, for those who come later or come back.

    A generation makes those before it obsolete, and what was said of them: a job may have very many.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, pb.Directive]] = []
        self._count = 0

    def add(self, directive: pb.Directive) -> None:
        """One more."""
        if directive.HasField("formed"):
            self._kept = [one for one in self._kept if not (one[1].HasField("formed") or one[1].HasField("regroup"))]
        self._count += 1
        self._kept.append((self._count, directive))

    def after(self, number: int) -> list[tuple[int, pb.Directive]]:
        """Those that matter still, after the one of that number."""
        return [one for one in self._kept if one[0] > number]
