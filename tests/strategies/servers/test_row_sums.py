import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.reference import bits, wide_values
from quorate.core.errors import FrameError
from quorate.strategies.servers.exchange import Star
from quorate.strategies.servers.rows import RowExchange, Rows, Table, sum_rows
from strategies.servers.stars import Case, at_all, case, stars

TABLE = Table(20, (3,), torch.float32)
TABLES = {1: TABLE, 3: Table(5, (2, 2), torch.float64), 4: Table(9, (), torch.float32)}


def rows_of(table: Table, indices: list[int], seed: int) -> Rows:
    values = wide_values(len(indices), torch.Size(table.shape).numel(), seed)
    stacked = torch.stack(values).to(table.dtype) if indices else torch.empty(0, dtype=table.dtype)
    return Rows(torch.tensor(sorted(indices), dtype=torch.int64), stacked.view(len(indices), *table.shape))


def reference(lanes: list[Rows]) -> dict[int, torch.Tensor]:
    """Row by row, one addition at a time."""
    total: dict[int, torch.Tensor] = {}
    for rows in lanes:
        for index, value in zip(rows.indices.tolist(), rows.values, strict=True):
            total[index] = total[index] + value if index in total else value.clone()
    return total


def assert_rows(found: Rows, expected: dict[int, torch.Tensor]) -> None:
    assert found.indices.tolist() == sorted(expected)
    for value, index in zip(found.values, sorted(expected), strict=True):
        assert bits(value.view(-1)) == bits(expected[index].view(-1))


@given(lanes=st.lists(st.sets(st.integers(0, 19), max_size=8), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_row_is_summed_over_the_lanes_that_have_it_in_lane_order(lanes: list[set[int]], seed: int) -> None:
    given_rows = [rows_of(TABLE, list(indices), seed + lane) for lane, indices in enumerate(lanes)]
    assert_rows(sum_rows(given_rows, TABLE), reference(given_rows))


def test_the_sign_of_a_zero_is_kept() -> None:
    lanes = [Rows(torch.tensor([2]), torch.full((1, 3), -0.0)), Rows(torch.tensor([2, 5]), torch.full((2, 3), -0.0))]
    assert torch.signbit(sum_rows(lanes, TABLE).values).all()


def test_a_gradient_of_rows_keeps_its_values_on_the_way() -> None:
    table = torch.nn.Embedding(20, 3, sparse=True)
    table(torch.tensor([4, 1, 4])).sum().backward()
    assert table.weight.grad is not None
    rows = Rows.of_gradient(table.weight.grad)
    assert rows.indices.tolist() == [1, 4]
    again = rows.as_gradient(table.weight)
    assert torch.equal(again.to_dense(), table.weight.grad.to_dense())
    again._values().mul_(2)
    assert rows.values[1].tolist() == [4, 4, 4], "it is over the same memory"


@pytest.mark.parametrize("indices", [[3, 2], [2, 2], [-1, 2], [4, 20]])
def test_numbers_that_are_no_rows_are_refused(indices: list[int]) -> None:
    with pytest.raises(FrameError, match="worker 7 sent numbers of rows"):
        Rows(torch.tensor(indices), torch.zeros(2, 3)).check(TABLE, "worker 7")


@pytest.mark.parametrize("count", [-1, 21])
def test_more_rows_than_there_are_are_refused(count: int) -> None:
    with pytest.raises(FrameError, match=f"sent {count} rows of a table of 20"):
        TABLE.check_count(count, "worker 7")


def lane_rows(lane: int) -> dict[int, Rows]:
    touched = {1: [lane, 7, 12 + lane], 3: [] if lane == 1 else [lane % 5, 4], 4: [lane]}
    return {block: rows_of(TABLES[block], sorted(set(rows)), 10 * lane + block) for block, rows in touched.items()}


def step(given: Case, position: int, star: Star) -> dict[int, Rows]:
    """The dense tensors go over the same links; new values are the sums."""
    rows = RowExchange(star.spokes, TABLES, given.holders)
    lanes = given.generation.members[position].lanes
    if position in given.workers:
        star.push(1)
        rows.push(1, {lane: lane_rows(lane) for lane in lanes})
        star.pull(1, given.empty(range(len(given.holders))))
        return rows.pull(1)
    star.receive(1)
    rows.receive(1)
    totals = given.empty(given.held(position))
    star.add_up(1, totals)
    star.publish(1, totals)
    sums = rows.add_up()
    rows.publish(1, sums)
    return sums


@pytest.mark.parametrize(
    ("workers", "servers", "replicas"), [(1, 1, 1), (2, 1, 1), (3, 2, 1), (3, 2, 2), (2, 3, 2), (5, 3, 1)]
)
def test_rows_travel_beside_dense_tensors_and_their_sums_do_not_depend_on_who_hosts_them(
    workers: int, servers: int, replicas: int
) -> None:
    given = case([(10, torch.float32)] * 5, 5, workers, servers, replicas)
    expected = {block: reference([lane_rows(lane)[block] for lane in range(5)]) for block in TABLES}
    with stars(given) as members:
        for position, found in enumerate(at_all(members, lambda at, star: step(given, at, star))):
            wanted = TABLES.keys() & (given.held(position) if position in given.servers else TABLES.keys())
            assert found.keys() == wanted
            for block, rows in found.items():
                assert_rows(rows, expected[block])


def test_what_travels_follows_the_rows_that_are_touched() -> None:
    table = Table(1_000_000, (64,), torch.float32)
    given = case([(0, torch.float32)], 1, 1, 1, replicas=1)
    touched = Rows(torch.arange(0, 1_000_000, 1000), torch.ones(1000, 64))

    def work(position: int, star: Star) -> int:
        rows = RowExchange(star.spokes, {0: table}, given.holders)
        if position == 0:
            rows.push(1, {0: {0: touched}})
            rows.pull(1)
        else:
            rows.receive(1)
            rows.publish(1, rows.add_up())
        return star.spokes.bytes_sent + star.spokes.bytes_received

    with stars(given) as members:
        assert at_all(members, work) == [2 * (1000 * (64 * 4 + 4) + 8)] * 2
