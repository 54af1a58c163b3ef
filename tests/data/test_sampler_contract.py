"""What every plan of an epoch promises, be it of samples one by one or in blocks."""

from collections.abc import Callable
from itertools import chain
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from data.block_cases import cases, stream
from data.jobs import sampler
from quorate.data.ledger import Tally
from quorate.data.sampler import Sampler

Plan = tuple[Callable[[], Sampler], int, dict[str, Any]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """What makes the sampler of a job, the number of samples, and the keys of the job."""
    records, window, keys = draw(cases())
    keys["epochs"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        return lambda: stream(records, window, **keys), sum(records), keys
    return lambda: sampler(sum(records), **keys), sum(records), keys


def plainly(given: Sampler, step: int, lane: int) -> list[list[int]]:
    return [part.tolist() for part in given.micro_batches(step, lane)]


@given(plans())
def test_each_epoch_reads_every_sample_once_or_lists_it_as_dropped(plan: Plan) -> None:
    make, samples, keys = plan
    given, per_epoch = make(), make().steps_per_epoch
    assert given.total_steps == keys["epochs"] * per_epoch
    for epoch in range(keys["epochs"]):
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        parts = (plainly(given, step, lane) for step in steps for lane in range(keys["lanes"]))
        used, dropped = list(chain.from_iterable(chain.from_iterable(parts))), given.dropped(epoch).tolist()
        assert sorted([*used, *dropped]) == list(range(samples))
        assert len(dropped) == (samples % keys["batch_size"] if keys["last_batch"] == "drop" else 0)
        assert {given.epoch_of(step) for step in steps} == {epoch}
        assert [given.ends_epoch(step) for step in steps] == [False] * (per_epoch - 1) + [True]
        assert Tally.of(epoch, used) + Tally.of(epoch, dropped) == given.planned(epoch)
        assert not given.is_own(epoch)


@given(plans())
def test_lanes_and_micro_batches_are_even_and_in_the_order_of_the_batch(plan: Plan) -> None:
    make, _, keys = plan
    given = make()
    for step in range(1, given.total_steps + 1):
        lanes = [plainly(given, step, lane) for lane in range(keys["lanes"])]
        assert list(chain.from_iterable(chain.from_iterable(lanes))) == given.batch(step).tolist()
        shares = [sum(map(len, parts)) for parts in lanes]
        assert sum(shares) == given.batch_samples(step)
        assert shares == [len(given.share(step, lane)) for lane in range(keys["lanes"])]
        assert max(shares) - min(shares) <= 1
        assert shares == sorted(shares, reverse=True)
        for parts, share in zip(lanes, shares, strict=True):
            assert len(parts) == min(share, keys["accumulate"])
            assert all(parts)


@given(plans(), st.data())
def test_whoever_asks_for_whatever_first_gets_the_same(plan: Plan, data: st.DataObject) -> None:
    """A worker that joins at the last epoch has not seen the first."""
    make, _, keys = plan
    given, again = make(), make()
    places = [(step, lane) for step in range(1, given.total_steps + 1) for lane in range(keys["lanes"])]
    forwards = {place: plainly(given, *place) for place in places}
    some = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=30))
    assert {place: plainly(again, *place) for place in some} == {place: forwards[place] for place in some}
    assert {place: plainly(make(), *place) for place in places[-1:]} == {
        place: forwards[place] for place in places[-1:]
    }
