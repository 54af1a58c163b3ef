from quorate.core.generation import Cursor, Generation, GenerationId, Member, Role
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import decode_generation, encode_generation

WORKER = Member(3, "10.0.0.1:7", range(2, 5), "boot/3", Cursor(9))
SERVER = Member(4, "10.0.0.2:7", range(0), role=Role.SERVER)


def test_members_keep_their_roles_and_only_workers_host_lanes() -> None:
    generation = Generation(GenerationId(1, 2), (WORKER, SERVER))
    assert decode_generation(encode_generation(generation)) == generation
    assert generation.workers == (WORKER,)
    assert generation.lanes == 3


def test_a_member_of_which_nothing_is_said_is_a_worker() -> None:
    assert decode_generation(pb.Generation(members=[pb.Member(worker=1)])).members[0].role is Role.WORKER


def test_a_sharded_gang_is_told_its_parts_and_the_checkpoint_that_it_goes_back_to() -> None:
    members = (Member(0, "10.0.0.1:7", range(1), part=0), Member(1, "10.0.0.2:7", range(1, 1), part=1))
    for restored in (None, Cursor(), Cursor(7).evaluated()):
        generation = Generation(GenerationId(1, 2), members, restored)
        assert decode_generation(encode_generation(generation)) == generation
