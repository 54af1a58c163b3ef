from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.lanes.buckets import TensorShape, plan_buckets
from quorate.strategies.servers.exchange import ALONE, plan_parcels
from quorate.strategies.servers.links import meetings

SIZES = st.lists(st.sampled_from([0, 1, 7, ALONE // 8, ALONE // 4, ALONE]), min_size=1, max_size=8)


@given(sizes=SIZES, data=st.data(), lie_in_buckets=st.booleans())
def test_every_chosen_tensor_that_has_elements_is_in_one_parcel(
    sizes: list[int], data: st.DataObject, lie_in_buckets: bool
) -> None:
    plan = plan_buckets([TensorShape(f"t{i}", "float32", 4, size) for i, size in enumerate(sizes)], 1)
    chosen = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    parcels = plan_parcels(plan, [4] * len(plan), chosen, lie_in_buckets=lie_in_buckets)
    sent = [slot.index for parcel in parcels for slot in parcel.slots]
    assert sorted(sent) == [index for index in sorted(chosen) if sizes[index]]
    for parcel in parcels:
        assert set(parcel.slots) <= set(plan[parcel.bucket].slots)
        assert parcel.numel == sum(sizes[slot.index] for slot in parcel.slots)
        if parcel.run is not None:
            assert parcel.run.stop - parcel.run.start == parcel.numel
    assert len({parcel.first for parcel in parcels}) == len(parcels)
    small = [parcel.bucket for parcel in parcels if parcel.numel * 4 < ALONE]
    assert len(set(small)) == len(small), "the small ones of a bucket are sent together"


def test_a_whole_bucket_is_one_parcel_that_needs_no_copy() -> None:
    plan = plan_buckets([TensorShape(f"t{i}", "float32", 4, size) for i, size in enumerate([5, ALONE, 0, 9])], 8)
    (parcel,) = plan_parcels(plan, [4], range(4), lie_in_buckets=True)
    assert parcel.run == slice(0, ALONE + 14)


@pytest.mark.parametrize(("workers", "servers"), list(product(range(1, 6), range(1, 6))))
def test_everybody_meets_everybody_and_nobody_waits_in_a_circle(workers: int, servers: int) -> None:
    of_workers = [list(meetings(workers, servers, worker=worker)) for worker in range(workers)]
    of_servers = [list(meetings(workers, servers, server=server)) for server in range(servers)]
    assert all(sorted(met) == list(range(servers)) for met in of_workers)
    assert all(sorted(met) == list(range(workers)) for met in of_servers)
    while any(of_workers):
        pairs = [(w, met[0]) for w, met in enumerate(of_workers) if met and of_servers[met[0]][0] == w]
        assert pairs, "all wait for somebody who waits for another"
        for worker, server in pairs:
            of_workers[worker].pop(0)
            of_servers[server].pop(0)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_as_many_servers_as_workers_are_all_busy_in_every_round(members: int) -> None:
    for round_ in range(members):
        assert len({meetings(members, members, worker=worker)[round_] for worker in range(members)}) == members
