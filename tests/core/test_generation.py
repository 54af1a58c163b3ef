from hypothesis import given
from hypothesis import strategies as st

from quorate.core.generation import Cursor, Generation, GenerationId, Member, MeshShape, Phase, common_cursor
from quorate.core.timing import Timing

GENERATION = Generation(
    GenerationId(2, 5),
    (Member(7, "host:1", range(2)), Member(3, "host:2", range(2, 3)), Member(9, "x", range(3, 5))),
)


def test_members_stand_in_lane_order_whatever_their_numbers() -> None:
    assert GENERATION.lanes == 5
    assert [GENERATION.position(worker) for worker in (7, 3, 9)] == [0, 1, 2]


def test_a_restarted_coordinator_outranks_every_number_before() -> None:
    assert GenerationId(1, 99) < GenerationId(2, 1) < GenerationId(2, 2)
    assert str(GenerationId(2, 1)) == "2.1"


def test_an_evaluated_step_is_more_advanced_than_a_trained_one() -> None:
    trained = Cursor().trained()
    assert trained == Cursor(1, Phase.TRAINED)
    assert Cursor() < trained < trained.evaluated() < trained.trained() == trained.evaluated().trained()


@given(st.floats(0.01, 1e6))
def test_a_worker_gives_up_before_its_lanes_are_given_away(failure_timeout: float) -> None:
    timing = Timing(failure_timeout)
    assert timing.heartbeat_every * 3 < timing.lease < timing.failure_timeout < timing.connect


# --- sharded gangs

MESHES = st.builds(MeshShape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


def sharded(mesh: MeshShape, steps: list[int], restored: Cursor | None = None) -> Generation:
    members = (
        Member(worker, "host:1", mesh.told_by(worker, mesh.groups), cursor=Cursor(step), part=mesh.part(worker))
        for worker, step in enumerate(steps)
    )
    return Generation(GenerationId(1, 1), tuple(members), restored)


@given(MESHES, st.integers(1, 3))
def test_every_lane_of_a_mesh_is_told_once_and_computed_by_all_of_its_tensor_dimension(
    mesh: MeshShape, each: int
) -> None:
    lanes = mesh.groups * each
    told = [lane for worker in range(mesh.size) for lane in mesh.told_by(worker, lanes)]
    computed = sorted(lane for worker in range(mesh.size) for lane in mesh.lanes_of(worker, lanes))
    assert told == list(range(lanes))
    assert computed == sorted(told * mesh.tensor)
    assert sorted(mesh.part(worker) for worker in range(mesh.size)) == sorted([*range(mesh.parts)] * mesh.replicate)


@given(st.data(), MESHES)
def test_a_mesh_goes_on_from_the_furthest_cursor_at_which_every_part_is_held(
    data: st.DataObject, mesh: MeshShape
) -> None:
    steps = data.draw(st.lists(st.integers(0, 3), min_size=mesh.size, max_size=mesh.size))
    cursors = [{step for worker, step in enumerate(steps) if mesh.part(worker) == part} for part in range(mesh.parts)]
    held = [step for step in range(4) if all(step in of_part for of_part in cursors)]
    common = common_cursor((mesh.part(worker), Cursor(step)) for worker, step in enumerate(steps))
    assert common == (Cursor(max(held)) if held else None)
    if common is None:
        return
    generation = sharded(mesh, steps)
    assert generation.cursor == common
    for part in range(mesh.parts):
        assert generation.holders(part)
        assert all(steps[at] == common.step and mesh.part(at) == part for at in generation.holders(part))
    assert generation.behind == tuple(worker for worker, step in enumerate(steps) if step != common.step)


@given(MESHES)
def test_a_generation_knows_its_mesh(mesh: MeshShape) -> None:
    assert sharded(mesh, [0] * mesh.size).mesh == mesh
    assert GENERATION.mesh is None


def test_where_a_part_is_lost_all_take_up_the_checkpoint_that_the_generation_names() -> None:
    generation = sharded(MeshShape(shard=2), [17, 12], Cursor(12))
    assert (generation.cursor, generation.behind) == (Cursor(12), (0,))
    assert (generation.holders(0), generation.holders(1)) == ((), (1,))
