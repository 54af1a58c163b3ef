"""Every sample exactly once an epoch, whoever reads it."""

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from data.jobs import sampler
from quorate.core.errors import JobError, TaskError, UserCodeError
from quorate.data.sampler import LaneSampler


def plainly(given: LaneSampler, step: int, lane: int) -> list[list[int]]:
    return [part.tolist() for part in given.micro_batches(step, lane)]


def test_totals_of_steps_and_epochs() -> None:
    keys: dict[str, Any] = {"batch_size": 8, "lanes": 2}
    assert sampler(20, epochs=3, **keys).total_steps == 6
    assert sampler(20, epochs=3, last_batch="keep", **keys).total_steps == 9
    assert sampler(16, epochs=3, last_batch="keep", **keys).total_steps == 6
    assert sampler(20, steps=5, **keys).total_steps == 5
    assert sampler(20, steps=5, **keys).epoch_of(5) == 2


def test_a_kept_last_batch_holds_the_rest() -> None:
    given = sampler(20, epochs=1, batch_size=8, lanes=8, last_batch="keep")
    assert len(given.batch(3)) == 4
    assert [len(given.micro_batches(3, lane)) for lane in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    keys: dict[str, Any] = {"batch_size": 40, "lanes": 2, "epochs": 2}
    given, other = sampler(40, seed=1, **keys), sampler(40, seed=2, **keys)
    orders = [tuple(given.batch(1)), tuple(given.batch(2)), tuple(other.batch(1)), tuple(other.batch(2))]
    assert len(set(orders)) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(40))}


def test_a_set_smaller_than_a_batch_is_refused_with_the_remedy() -> None:
    with pytest.raises(TaskError, match=r"5 samples.*batch_size: 8.*batch_size of at most 5.*last_batch: keep"):
        sampler(5, batch_size=8, lanes=2, epochs=1)
    with pytest.raises(TaskError, match=r"An epoch of order\(\) has 3 samples, less than one batch"):
        sampler(9, lambda epoch, generator: range(3), batch_size=8, lanes=2, epochs=1)
    with pytest.raises(TaskError, match=r"order\(\) returned no samples for epoch 0"):
        sampler(9, lambda epoch, generator: [], batch_size=8, lanes=2, epochs=1)
    assert sampler(5, batch_size=8, lanes=2, epochs=1, last_batch="keep").total_steps == 1


class TestOrderOfOnesOwn:
    keys: ClassVar[dict[str, Any]] = {"batch_size": 2, "lanes": 2, "epochs": 3}

    def test_samples_may_be_left_out_and_repeated(self) -> None:
        given = sampler(5, lambda epoch, generator: [4, 4, epoch, 0], **self.keys)
        assert given.steps_per_epoch == 2
        assert [given.batch(step).tolist() for step in (1, 2, 5, 6)] == [[4, 4], [0, 0], [4, 4], [2, 0]]
        assert given._epoch(2).tolist() == [4, 4, 2, 0]

    def test_each_epoch_is_known_to_be_its_own_or_shuffled(self) -> None:
        given = sampler(5, lambda epoch, generator: [4, 4, 1, 0, 2] if epoch % 2 else None, **self.keys)
        assert [given.is_own(epoch) for epoch in (2, 1, 0)] == [False, True, False]
        assert given.dropped(1).tolist() == [2]

    @pytest.mark.parametrize("kind", [torch.tensor, tuple, list])
    def test_tensors_and_tuples_will_do(self, kind: Any) -> None:
        given = sampler(4, lambda epoch, generator: kind([3, 1, 2, 0]), **self.keys)
        assert plainly(given, 1, 0) == [[3]]

    def test_its_generator_is_a_fact_of_seed_and_epoch(self) -> None:
        def order(epoch: int, generator: torch.Generator) -> Sequence[int]:
            return torch.randperm(30, generator=generator).tolist()

        keys = self.keys | {"batch_size": 30}
        given, again = sampler(30, order, **keys), sampler(30, order, **keys)
        last = again.batch(3).tolist()
        assert [given.batch(step).tolist() for step in (1, 2, 3)][-1] == last
        assert given.batch(1).tolist() != given.batch(2).tolist()

    def test_drawing_from_the_global_generators_is_a_fact_of_seed_and_epoch_too(self) -> None:
        def order(epoch: int, generator: torch.Generator) -> Sequence[int]:
            chosen = torch.randperm(30).tolist()
            random.shuffle(chosen)
            return chosen

        keys = self.keys | {"batch_size": 30}
        given = sampler(30, order, **keys)
        orders = [given.batch(step).tolist() for step in (1, 2, 3)]
        again = sampler(30, order, **keys)
        assert [again.batch(step).tolist() for step in (3, 2, 1)] == orders[::-1]

    def test_another_length_in_a_later_epoch_is_refused(self) -> None:
        given = sampler(9, lambda epoch, generator: range(4 + 2 * epoch), **self.keys)
        assert given.batch(2).tolist() == [2, 3]
        with pytest.raises(JobError, match="6 samples for epoch 1 and 4 for epoch 0"):
            given.batch(3)

    @pytest.mark.parametrize("index", [-1, 4])
    def test_an_index_outside_is_refused_by_number_and_epoch(self, index: int) -> None:
        with pytest.raises(TaskError, match=rf"sample {index} in epoch 0.*samples 0 to 3"):
            sampler(4, lambda epoch, generator: [0, 1, 2, index], **self.keys)
        given = sampler(4, lambda epoch, generator: [0, 1, 2, index if epoch else 3], **self.keys)
        with pytest.raises(JobError, match=rf"sample {index} in epoch 1"):
            given.batch(3)

    def test_an_exception_in_a_later_epoch_is_the_users(self) -> None:
        def order(epoch: int, generator: torch.Generator) -> Sequence[int]:
            if epoch:
                raise RuntimeError("no more orders")
            return range(4)

        given = sampler(4, order, **self.keys)
        with pytest.raises(UserCodeError, match=r"RuntimeError: no more orders \(in order\(\)\)"):
            given.batch(3)

    def test_something_that_is_no_sequence_of_numbers_is_the_users_mistake(self) -> None:
        with pytest.raises(UserCodeError, match=r"order\(\)"):
            sampler(4, lambda epoch, generator: ["a", "b"], **self.keys)  # type: ignore[list-item]
