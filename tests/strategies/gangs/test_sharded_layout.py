"""States over a mesh: what all members write together is what one process has, and what any other mesh takes up."""

import copy
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.reshard import collected, join_skeletons
from quorate.checkpoint.store import CheckpointFolder
from quorate.checkpoint.tensor_file import TensorFile
from quorate.checkpoint.tree import Encoded, check_written, decode
from quorate.core.errors import RunError
from quorate.core.generation import Cursor, Generation, GenerationId, Member, MeshShape
from quorate.replica.device import digests
from quorate.replica.state_layout import HeldState
from quorate.task.progress import Progress
from quorate.training.divergence import Voucher, divergence
from strategies.gangs.mesh_replicas import alone, member, train

PROGRESS = Progress().after_step(8)
FOUR, TENSOR, BOTH, REPLICAS, ONE = (
    MeshShape(*sizes) for sizes in ((1, 4, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 1))
)
MESHES = [FOUR, TENSOR, BOTH, REPLICAS, ONE]


@cache
def trained(shape: MeshShape) -> list[tuple[HeldState, tuple[str, ...]]]:
    """What each member of a mesh holds after some steps, and the names of what it writes."""
    everyone = []
    for rank in range(shape.size):
        with member(shape, rank) as layout:
            train(layout.replica)
            held = layout.state(PROGRESS)
            parts = layout.parts(held, shape.size)
            assert len(parts) == shape.size
            everyone.append((copy.deepcopy(held), parts[rank]))
    return everyone


def expected(shape: MeshShape, rank: int) -> dict[str, str]:
    return digests(trained(shape)[rank][0].compared.items())


def saved(shape: MeshShape, folder: Path) -> CheckpointInfo:
    skeleton = join_skeletons(held.encoded.skeleton for held, _ in trained(shape))
    manifest = Manifest(1, 0, "", (), skeleton, "", {}, {}, {})
    store = CheckpointFolder(folder)
    attempt = store.open(manifest.cursor)
    for rank, (held, own) in enumerate(trained(shape)):
        file = TensorFile({name: held.encoded.tensors[name] for name in own})
        attempt.write(rank, shape.size, file.chunks())
    return store.commit(attempt.name, manifest, lambda: None)


@cache
def trained_alone() -> Encoded:
    layout = alone()
    train(layout.replica)
    return copy.deepcopy(layout.state(PROGRESS).encoded)


def bits(encoded: Encoded) -> dict[str, str]:
    """Of a whole state, by the names that one process gives its tensors."""
    read = collected(encoded.skeleton, encoded.tensors.items(), None)
    whole = decode(read.skeleton, read.tensors)["replica"]
    optimizer = whole["optimizers"][""]["state"]
    flat = {f"{index} {key}": value for index, kept in optimizer.items() for key, value in kept.items()}
    return digests((whole["tensors"] | flat).items())


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_all_members_together_hold_what_one_process_holds(shape: MeshShape) -> None:
    everyone = trained(shape)
    written = [name for _, own in everyone for name in own]
    assert sorted(written) == sorted({name for held, _ in everyone for name in held.encoded.tensors})
    tensors = {name: held.encoded.tensors[name] for held, own in everyone for name in own}
    skeleton = join_skeletons(held.encoded.skeleton for held, _ in everyone)
    check_written(skeleton, [tensors])
    assert bits(Encoded(skeleton, tensors)) == bits(trained_alone())
    sizes = [TensorFile({name: tensors[name] for name in own}).size for _, own in everyone]
    assert max(sizes) < 2.2 * sum(sizes) / len(sizes) + 500, "each writes about as much as the others"


@pytest.mark.parametrize(("before", "after"), [*pairwise(MESHES), (ONE, FOUR), (BOTH, FOUR)], ids=str)
def test_a_checkpoint_is_taken_up_by_any_other_mesh(before: MeshShape, after: MeshShape, tmp_path: Path) -> None:
    info, store = saved(before, tmp_path), CheckpointFolder(tmp_path)
    for rank in {after.size // 2, after.size - 1}:
        held_by_one = expected(after, rank)  # first: there is only one member at a time
        with member(after, rank) as layout:
            loaded = store.load(info, layout.boxes).encoded
            assert layout.load(loaded) == PROGRESS
            held = layout.state(PROGRESS)
            assert digests(held.compared.items()) == held_by_one
            assert loaded.tensors.keys() == held.encoded.tensors.keys(), "nothing is read that is not held"


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_one_process_takes_up_the_checkpoint_of_a_mesh(shape: MeshShape, tmp_path: Path) -> None:
    info = saved(shape, tmp_path)
    layout = alone()
    assert layout.load(CheckpointFolder(tmp_path).load(info).encoded) == PROGRESS
    assert bits(layout.state(PROGRESS).encoded) == bits(trained_alone())


def test_a_mesh_takes_up_the_state_of_one_process_and_goes_on_with_the_same_bits() -> None:
    held_by_one, state = expected(BOTH, 3), trained_alone()
    with member(BOTH, 3) as layout:
        assert layout.load(collected(state.skeleton, state.tensors.items(), layout.boxes)) == PROGRESS
        assert digests(layout.state(PROGRESS).compared.items()) == held_by_one
        train(layout.replica, 1)
        resumed = digests(layout.state(PROGRESS).compared.items())
    with member(BOTH, 3) as layout:
        train(layout.replica)
        train(layout.replica, 1)
        assert digests(layout.state(PROGRESS).compared.items()) == resumed


def test_replicas_of_a_part_are_compared_and_nobody_else() -> None:
    everyone = [copy.deepcopy(held) for held, _ in trained(REPLICAS)]
    told = [Voucher(r, digests(held.compared.items()), is_partial=True) for r, held in enumerate(everyone)]
    assert divergence(1, told) is None
    assert everyone[0].weights <= {name for voucher in told for name in voucher.digests}
    everyone[3].compared["0.weight (part 1)"].view(-1)[0] += 1
    told[3] = Voucher(3, digests(everyone[3].compared.items()), is_partial=True)
    found = divergence(1, told)
    assert found is not None
    for words in ("worker 1", "worker 3", "'0.weight (part 1)'"):
        assert words in str(found)


def test_who_is_behind_copies_from_a_replica_of_its_part() -> None:
    donated = trained(REPLICAS)[1][0]
    with member(REPLICAS, 3) as layout:
        members = tuple(
            Member(p, "", range(p, p + 1), cursor=Cursor(0 if p in (0, 3) else 1), part=REPLICAS.part(p))
            for p in range(4)
        )
        assert layout.donors(Generation(GenerationId(1, 1), members)) == {0: 2, 3: 1}
        assert layout.load(donated.common) == PROGRESS
        assert digests(layout.state(PROGRESS).compared.items()) == digests(donated.compared.items())


def test_another_model_is_refused_by_name() -> None:
    state = trained_alone()
    tensors = state.tensors | {"replica.tensors.0.weight": torch.zeros(5, 5)}
    with member(TENSOR, 0) as sharded, pytest.raises(RunError, match=r"'0.weight' has shape \(5, 5\) there"):
        sharded.load(Encoded(state.skeleton, tensors))
