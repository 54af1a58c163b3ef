"""Encoded gradients: exactly what was chosen comes back, in any company, and nothing else is taken for one."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from collectives.reference import bits, wide_values
from quorate.collectives.reduction import sum_lanes
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.strategies.compression.compressor import (
    Compressor,
    EncodedLane,
    MalformedGradient,
    Method,
    decode_ascending,
    encode_ascending,
)
from quorate.strategies.compression.methods import RUN, EightBits, TopK, count_of

METHODS = [TopK(0.1), EightBits()]
ODD = [0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, math.inf, -math.inf, math.nan, 2.5]
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def plan_of(sizes: list[int], dtype: torch.dtype = torch.float32, mb: float = 1e-4) -> tuple[Bucket, ...]:
    shapes = [TensorShape(f"p{i}", str(dtype), dtype.itemsize, size) for i, size in enumerate(sizes)]
    return plan_buckets(shapes, mb)


def flats(plan: tuple[Bucket, ...], values: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(values, [bucket.numel for bucket in plan]))


def all_of(sizes: list[int]) -> int:
    return (1 << len(sizes)) - 1


def dense(
    compressor: Compressor, encoded: EncodedLane, plan: tuple[Bucket, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    totals = [torch.full((bucket.numel,), 7.0, dtype=dtype) for bucket in plan]
    compressor.add_up({0: encoded}, totals)
    return totals


def bits_of(values: torch.Tensor) -> bytes:
    return bits(values) if len(values) else b""


# --- Top-K


def chosen_slowly(values: list[float], count: int) -> list[int]:
    def size(index: int) -> float:
        return math.inf if math.isnan(values[index]) else abs(values[index])

    nans = [math.isnan(value) for value in values]
    order = sorted(range(len(values)), key=lambda index: (not nans[index], -size(index), index))
    return sorted(order[:count])


@given(
    values=st.lists(st.sampled_from(ODD) | st.floats(width=32), min_size=1, max_size=60), fraction=st.floats(0.01, 1)
)
def test_the_largest_go_and_of_equal_ones_the_first(values: list[float], fraction: float) -> None:
    flat = torch.tensor(values)
    count = count_of(fraction, len(values))
    payload, content = TopK(fraction).encode(flat, (len(values),))
    assert content.places.tolist() == chosen_slowly(flat.tolist(), count)
    assert bits(content.values) == bits(flat[content.places])
    found, size = TopK(fraction).decode(memoryview(payload), torch.float32, (len(values),))
    assert size == len(payload)
    assert torch.equal(found.places, content.places)
    assert bits(found.values) == bits(content.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_travel_as_they_are(dtype: torch.dtype) -> None:
    flat = torch.tensor([0.5, -3.0, 1.0, 2.0], dtype=dtype)
    payload, content = TopK(0.5).encode(flat, (4,))
    assert content.places.tolist() == [1, 3]
    assert len(payload) == 3 + 2 * dtype.itemsize
    found, _ = TopK(0.5).decode(memoryview(payload), dtype, (4,))
    assert found.values.tolist() == [-3.0, 2.0]


# --- 8 bits


@given(
    sizes=st.lists(st.integers(0, 3 * RUN), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_each_element_comes_back_within_half_a_multiple_of_its_run(
    sizes: list[int], seed: int, dtype: torch.dtype
) -> None:
    flat = wide_values(1, sum(sizes), seed)[0].to(dtype)
    payload, content = EightBits().encode(flat, sizes)
    found, size = EightBits().decode(memoryview(payload), dtype, sizes)
    assert size == len(payload) <= sum(sizes) + 8 * sum(-(-size // RUN) for size in sizes)
    assert bits_of(found.values) == bits_of(content.values)
    for block, restored in zip(torch.split(flat, sizes), torch.split(content.values, sizes), strict=True):
        for run, back in zip(torch.split(block, RUN), torch.split(restored, RUN), strict=True):
            if len(run):
                largest = run.double().abs().max()
                slack = largest * (0.5 / 127 + torch.finfo(dtype).eps)
                assert ((run.double() - back.double()).abs() <= slack).all()


def test_a_run_that_is_not_finite_comes_back_as_no_numbers_and_others_as_they_were() -> None:
    flat = torch.ones(3 * RUN)
    flat[5], flat[RUN + 1] = math.inf, math.nan
    values = EightBits().encode(flat, (3 * RUN,))[1].values
    assert values[: 2 * RUN].isnan().all()
    assert torch.equal(values[2 * RUN :], flat[2 * RUN :])


def test_numbers_too_small_for_a_scale_come_back_as_zero() -> None:
    flat = torch.tensor([1e-45, -1e-45, 0.0, -0.0])
    assert EightBits().encode(flat, (4,))[1].values.tolist() == [0.0] * 4


# --- places


@given(gaps=st.lists(st.integers(0, 2**40) | st.integers(0, 300), max_size=50))
def test_places_come_back_from_their_gaps(gaps: list[int]) -> None:
    places, place = [], -1
    for gap in gaps:
        place += gap + 1
        places.append(place)
    payload = encode_ascending(torch.tensor(places, dtype=torch.int64).numpy())
    found, size = decode_ascending(memoryview(payload + b"rest"), len(places), place + 1)
    assert found.tolist() == places
    assert size == len(payload)


# --- several blocks


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@given(sizes=SIZES, seed=st.integers(0, 99), absent=st.integers(0, 31))
def test_what_is_sent_and_what_is_held_back_are_all_of_it(
    method: Method, sizes: list[int], seed: int, absent: int
) -> None:
    plan, present = plan_of(sizes), all_of(sizes) & ~absent
    compressor = Compressor(method, plan, 1)
    lane = flats(plan, wide_values(1, sum(sizes), seed)[0])
    before = [flat.clone() for flat in lane]
    encoded = compressor.encode(4, 0, present, lane)
    sent = dense(compressor, compressor.decode(4, 0, encoded.payload), plan, torch.float32)
    encoded.take_out(lane)
    for bucket, whole, rest, told in zip(plan, before, lane, sent, strict=True):
        for slot in bucket.slots:
            place = slice(slot.offset, slot.offset + slot.numel)
            if not present >> slot.index & 1:
                assert torch.equal(rest[place], whole[place])
                assert not told[place].any()
                continue
            assert torch.equal(rest[place], whole[place] - told[place])
            if not isinstance(method, EightBits):
                assert int((told[place] != 0).sum()) == count_of(0.1, slot.numel)
                assert ((told[place] == 0) | (told[place] == whole[place])).all()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@given(sizes=SIZES, lanes=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
def test_the_sum_is_the_rings_and_the_same_for_some_of_the_blocks(
    method: Method, sizes: list[int], lanes: int, seed: int, data: st.DataObject
) -> None:
    plan = plan_of(sizes)
    gradients = [flats(plan, value) for value in wide_values(lanes, sum(sizes), seed)]
    present = [data.draw(st.integers(0, all_of(sizes))) for _ in range(lanes)]
    whole = Compressor(method, plan, lanes)
    encoded = {lane: whole.encode(1, lane, present[lane], gradients[lane]) for lane in range(lanes)}
    totals = [torch.full((bucket.numel,), 7.0) for bucket in plan]
    whole.add_up(encoded, totals)
    alone = Compressor(method, plan, 1)
    for number, bucket in enumerate(plan):
        # Each lane by itself, and then as the ring adds them. From zeros, so that no sum is a negative zero.
        decoded = []
        for lane in range(lanes):
            out = [torch.zeros(other.numel) for other in plan]
            alone.add_up({0: EncodedLane(b"", encoded[lane].parts)}, out)
            decoded.append(out[number])
        expected = torch.zeros(bucket.numel)
        sum_lanes(decoded, expected)
        assert torch.equal(totals[number], expected)
    chosen = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    assume(chosen)
    server = Compressor(method, plan, lanes, chosen)
    received = {
        lane: server.decode(1, lane, server.encode(1, lane, present[lane], gradients[lane]).payload)
        for lane in range(lanes)
    }
    partial = [torch.full((bucket.numel,), 7.0) for bucket in plan]
    server.add_up(received, partial)
    for bucket, of_all, of_some in zip(plan, totals, partial, strict=True):
        for slot in bucket.slots:
            place = slice(slot.offset, slot.offset + slot.numel)
            if slot.index in chosen:
                assert bits_of(of_some[place]) == bits_of(of_all[place])
            else:
                assert (of_some[place] == 7.0).all(), "what others sum is left alone"


def test_a_sum_needs_every_lane() -> None:
    plan = plan_of([4])
    compressor = Compressor(TopK(0.5), plan, 2)
    lane = compressor.encode(1, 0, 1, [torch.ones(4)])
    with pytest.raises(ValueError, match="lanes 0 to 1"):
        compressor.add_up({0: lane}, [torch.zeros(4)])


# --- damage


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@given(
    cut_off=st.integers(1, 60), flipped=st.integers(0, 10_000), extra=st.binary(max_size=3), what=st.sampled_from("cfe")
)
def test_damaged_bytes_are_an_error_or_numbers_of_the_right_places(
    method: Method, cut_off: int, flipped: int, extra: bytes, what: str
) -> None:
    """A flipped bit of a value is a value, for which links have checksums. Everything else is noticed."""
    sizes = [30, 0, 7, 200]
    plan = plan_of(sizes)
    compressor = Compressor(method, plan, 1)
    payload = compressor.encode(4, 0, all_of(sizes), flats(plan, wide_values(1, sum(sizes), 1)[0])).payload
    if what == "c":
        damaged = bytearray(payload)[: max(0, len(payload) - cut_off)]
    elif what == "e":
        damaged = bytearray(payload + extra)
    else:
        place = flipped % (8 * len(payload))
        damaged = bytearray(payload)
        damaged[place // 8] ^= 1 << place % 8
    if what != "f" and bytes(damaged) != payload:
        with pytest.raises(MalformedGradient, match="of lane 0 at step 4 is damaged"):
            compressor.decode(4, 0, bytes(damaged))
        return
    try:
        found = compressor.decode(4, 0, bytes(damaged))
    except MalformedGradient as error:
        assert "of lane 0 at step 4 is damaged" in str(error)
        return
    assert all(
        total.shape == (bucket.numel,)
        for total, bucket in zip(dense(compressor, found, plan, torch.float32), plan, strict=True)
    )


def test_what_is_of_another_lane_or_step_is_refused() -> None:
    plan = plan_of([4])
    compressor = Compressor(TopK(0.5), plan, 2)
    payload = compressor.encode(4, 1, 1, [torch.ones(4)]).payload
    with pytest.raises(MalformedGradient, match="it is of lane 1 at step 4"):
        compressor.decode(4, 0, payload)
    with pytest.raises(MalformedGradient, match="of lane 1 at step 5 is damaged: it is of lane 1 at step 4"):
        compressor.decode(5, 1, payload)
