"""What the coordinator declares to its workers, for as long as it matters."""

from quorate.coordinator.actions import Action, DeclareGeneration, Dismiss, Regroup, RelaySave, RelayStop
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.codec import encode_generation, encode_id

# What each kind makes obsolete.
_OBSOLETE = {"formed": ("formed", "regroup", "save"), "save": ("save",)}


def directive_of(action: Action, incarnation: int) -> pb.Directive | None:
    """What a coordinator tells the workers for an action, if anything."""
    match action:
        case DeclareGeneration(generation):
            return pb.Directive(formed=encode_generation(generation))
        case RelayStop(reason):
            return pb.Directive(stop=pb.StopDirective(reason=reason))
        case RelaySave(generation, request):
            return pb.Directive(save=pb.SaveDirective(generation=encode_id(generation), request=request))
        case Regroup(generation, at_boundary, saves):
            regroup = pb.RegroupDirective(generation=encode_id(generation), at_boundary=at_boundary, saves=saves)
            return pb.Directive(regroup=regroup)
        case Dismiss(worker, pid):
            return pb.Directive(dismiss=pb.DismissDirective(worker=worker, pid=pid, incarnation=incarnation))
    return None


class Directives:
    """Numbered in their order, for those who come later or come back.

    A generation makes those before it obsolete, and what was said of them: a job may have very many. So does a wish for
    a checkpoint the wishes before it.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, pb.Directive]] = []
        self._count = 0

    def add(self, directive: pb.Directive) -> None:
        """One more."""
        obsolete = _OBSOLETE.get(directive.WhichOneof("what") or "", ())
        self._kept = [one for one in self._kept if one[1].WhichOneof("what") not in obsolete]
        self._count += 1
        self._kept.append((self._count, directive))

    def after(self, number: int) -> list[tuple[int, pb.Directive]]:
        """Those that matter still, after the one of that number."""
        return [one for one in self._kept if one[0] > number]
