"""How `main` and the loop take turns: who sees which batch, what survives, and what each mistake is answered with."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from quorate.core.errors import QuorateError, WorkerUnfit
from quorate.core.generation import Cursor
from quorate.data.sampler import Source
from quorate.observe.events import StepCompleted
from quorate.own_loop import rehearsal as own_rehearsal
from quorate.own_loop.loop import OwnLoop, own_loop_of
from quorate.own_loop.rehearsal import Rehearsals
from quorate.own_loop.run import Run
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Replicated
from quorate.replica.state_watch import StateWatch
from quorate.spec.job import JobSpec
from quorate.task.progress import Progress
from quorate.task.task import configure
from quorate.worker.assembly import build_samples, sampler_of

DATA = TensorDataset(torch.arange(12.0))
EPOCH = 3  # steps of 4 samples
Main = Callable[..., Any]


@pytest.fixture(autouse=True)
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen is what the first `main` sees."""
    monkeypatch.setattr(own_rehearsal, "LARGEST", -1)


class Worker:
    """The loop's side, by hand: `stand` is where a generation begins, `step` does one step of all hosted lanes."""

    audited = 0

    def __init__(self, main: Main, hosted: range = range(2), **keys: Any) -> None:
        defaults: dict[str, Any] = {"task": "t.py:main", "lanes": 2, "batch_size": 4, "epochs": 3}
        self.spec = JobSpec.model_validate(defaults | keys)
        self.hosted = hosted
        task = configure(own_loop_of(main), self.spec.params, "test", 0, self.spec)
        assert isinstance(task, OwnLoop)
        self.task: OwnLoop = task
        self.replica = Replica(self.task, self.spec)
        self.sampler = sampler_of(self.spec, self.task, build_samples(self.task, self.spec).datasets[Source.TRAINING])
        self.watch = StateWatch(self.task, self.replica)
        self.progress = Progress()

    def stand(self, progress: Progress | None = None) -> "Worker":
        if progress is not None:
            self.task.take_up(progress, self.sampler)
        self.progress = progress or self.progress
        self.progress = self.task.enter(self.progress, self.sampler, self.hosted, self.watch)
        self.turns = Rehearsals(self.task, self.watch, self.sampler)
        self.turns._tries = self.audited
        self.progress = self.turns.after_evaluation(self.progress)
        return self

    def lanes(self, batches: int = 1) -> Iterator[Any]:
        """The losses of a step that is not completed."""
        step = self.progress.cursor.step + 1
        self.turns.begin_step(self.progress)
        for lane in self.hosted:
            for _ in range(batches):
                yield self.task.loss(self.replica.model, f"{step}.{lane}")
            self.task.end_lane(lane)

    def step(self, steps: int = 1) -> "Worker":
        for _ in range(steps):
            list(self.lanes())
            self.progress = self.progress.after_step(4)
            number = self.progress.cursor.step
            told = StepCompleted(step=number, epoch=self.sampler.epoch_of(number), losses={"": float(number)})
            self.progress = self.turns.after_step(self.progress, told)
            self.progress = self.turns.after_evaluation(self.progress)
        return self


def at(step: int, kept: str = "") -> Progress:
    return Progress(cursor=Cursor(step), kept=kept)


def loss() -> torch.Tensor:
    return torch.zeros(())


def prepared(run: Run) -> nn.Module:
    model = nn.Linear(1, 1)
    given: nn.Module = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    return given


def recording(seen: list[Any], before: bool = False) -> Main:
    """A loop that notes what it sees; it names its data before its epochs, or inside."""

    def main(run: Run) -> None:
        prepared(run)
        data = run.batches(DATA) if before else None
        for epoch in run.epochs():
            seen.append(f"epoch {epoch}")
            for batch in data or run.batches(DATA):
                seen.append(batch)
                result = run.step(loss())
                seen.append(None if result is None else result.step)
            seen.append("after")
        seen.append("end")

    return main


def begun(seen: list[Any], before: bool = False, **keys: Any) -> Worker:
    """A worker with such a loop; what another one has seen, which was sent ahead to find the data, is left out."""
    worker = Worker(recording(seen, before), **keys)
    assert seen == ([] if before else ["epoch 0"])
    seen.clear()
    return worker


def a_step(number: int) -> list[Any]:
    return [f"{number}.0", None, f"{number}.1", number]


@pytest.mark.parametrize("before", [True, False])
def test_main_sees_each_lane_and_gets_the_result_on_the_last(before: bool) -> None:
    seen: list[Any] = []
    worker = begun(seen, before, epochs=2).stand().step(EPOCH)
    assert seen[:13] == ["epoch 0", *a_step(1), *a_step(2), *a_step(3)]
    assert seen[13:] == ["after", "epoch 1"], "what follows an epoch is done with its last step"
    worker.step(EPOCH)
    assert seen[15:] == [*a_step(4), *a_step(5), *a_step(6), "after"]
    worker.task.finish()
    assert seen[28:] == ["end"]


def test_without_epochs_the_batches_are_those_of_the_whole_job() -> None:
    seen: list[Any] = []

    def main(run: Run) -> None:
        prepared(run)
        for batch in run.batches(DATA):
            seen.append(batch)
            run.step(loss())
        seen.append("end")

    worker = Worker(main, hosted=range(1), epochs=2).stand().step(2 * EPOCH)
    worker.task.finish()
    assert seen == [*(f"{step}.0" for step in range(1, 7)), "end"]


def test_the_batches_of_a_step_that_is_done_again_are_seen_once_more() -> None:
    seen: list[Any] = []
    worker = begun(seen).stand().step()
    list(worker.lanes())  # the exchange fails
    worker.stand().step()
    assert seen[5:] == ["2.0", None, "2.1", None, *a_step(2)]
    next(worker.lanes())  # the generation ends between two lanes
    worker.stand().step()
    assert seen[13:] == ["3.0", None, *a_step(3), "after", "epoch 1"]


def test_a_step_that_others_have_done_is_not_seen_again() -> None:
    seen: list[Any] = []
    worker = begun(seen).stand().step(EPOCH - 1)
    list(worker.lanes())
    worker.stand(at(EPOCH)).step()
    assert seen[9:] == ["3.0", None, "3.1", None, "after", "epoch 1", *a_step(4)]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("step", "begins"), [(1, ["epoch 0"]), (3, ["epoch 0", "after", "epoch 1"]), (4, ["epoch 1"]), (7, ["epoch 2"])]
)
def test_a_newcomer_begins_at_the_step_of_the_others(step: int, begins: list[str], before: bool) -> None:
    seen: list[Any] = []
    worker = begun(seen, before)
    worker.stand(at(step)).step()
    assert seen == [*begins, *a_step(step + 1)]


def test_whoever_has_to_go_back_to_another_epoch_makes_room_for_another_process() -> None:
    worker = begun([]).stand().step(8)
    with pytest.raises(WorkerUnfit, match=re.escape("main() is in epoch 2 already, and has to go back to 0")):
        worker.stand(at(2))


def counting(run: Run) -> None:
    prepared(run)
    run.state["steps"], run.state["epochs"] = 0, 0
    for _ in run.epochs():
        for _ in run.batches(DATA):
            if run.step(loss()) is not None:
                run.state["steps"] += 1
        run.state["epochs"] += 1


@pytest.mark.parametrize("step", range(9))
def test_what_main_keeps_is_the_same_for_a_newcomer_at_any_step(step: int) -> None:
    whole = Worker(counting).stand().step(8).progress
    first = Worker(counting).stand().step(step)
    late = Worker(counting).stand(first.progress).step(8 - step)
    assert late.progress.kept == whole.kept
    epoch, state, *others = json.loads(whole.kept)
    assert (epoch, json.loads(state), *others) == (2, {"steps": 8, "epochs": 2}, {}, {}, False)
    # And for one that was behind.
    behind = Worker(counting).stand().step(min(1, step)).stand(first.progress)
    assert behind.step(8 - step).progress.kept == whole.kept


def test_a_newcomer_has_the_initial_weights_on_its_way_to_the_epoch_of_the_others() -> None:
    seen: list[float] = []

    def main(run: Run) -> None:
        model = prepared(run)
        weight = next(model.parameters())
        seen.append(weight.item())
        for _ in run.epochs():
            seen.append(weight.item())
            for _ in run.batches(DATA):
                run.step(weight.sum())

    worker = Worker(main)
    layout, other = Replicated(worker.replica), Worker(main).replica
    worker.replica.before_load = lambda progress: worker.task.take_up(progress, worker.sampler)
    with torch.no_grad():
        initial = next(other.model.parameters()).item()
        next(other.model.parameters()).fill_(9)
    seen.clear()
    layout.load(Replicated(other).state(at(5)).encoded)
    assert seen == [initial]
    assert next(worker.replica.model.parameters()).item() == 9


def test_micro_batches_of_a_lane_are_batches() -> None:
    seen: list[Any] = []
    worker = begun(seen, batch_size=8, accumulate=2).stand()
    assert len(list(worker.lanes(batches=2))) == 4
    assert seen[1:] == ["1.0", None, "1.0", None, "1.1", None, "1.1"]


# Mistakes: each is a loop, and what it is answered with. Others are in the catalogue, with all that is told.


def returns_at_once(run: Run) -> None:
    pass


def reads_nothing(run: Run) -> None:
    prepared(run)


def trains_by_itself(run: Run) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    while True:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()


def then(act: Main) -> Main:
    """A loop that prepares, and then does this."""

    def main(run: Run) -> None:
        prepared(run)
        act(run)

    return main


@pytest.mark.parametrize(
    ("main", "answer"),
    [
        (trains_by_itself, "trains_by_itself() calls optimizer.step() before it has read a batch of run.batches()"),
        (returns_at_once, "returns_at_once() returned without run.prepare(model, optimizer)"),
        (lambda run: run.step(loss()), "run.step() was called before run.prepare"),
        (lambda run: run.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters()), None), "was given a SGD as the model"),
        (then(prepared), "run.prepare() was called twice"),
        (reads_nothing, "reads_nothing() reads no batch. Write `for batch in run.batches(dataset)"),
        (then(lambda run: run.batches(iter([1, 2]))), "given a list_iterator as the training set, which has no len()"),
        (then(lambda run: list(run.batches(DATA, batch_size=2))), "the job says 4, and run.batches() says 2"),
        (then(lambda run: run.evaluate(DATA, {})), "run.evaluate() was given a dict"),
        (then(lambda run: run.clip(0)), "run.clip() was given the int 0"),
        (then(lambda run: run.step(loss())), "run.step(loss) is called once for each batch"),
    ],
)
def test_a_mistake_before_the_first_batch_is_refused(main: Main, answer: str) -> None:
    with pytest.raises(QuorateError, match=re.escape(answer)) as refused:
        Worker(main)
    assert refused.value.exit_code == 2


def test_who_asks_too_early_whether_it_is_the_leading_worker_is_told() -> None:
    seen: list[bool] = []

    def main(run: Run) -> None:
        seen.append(run.is_main)
        prepared(run)
        for _ in run.epochs():
            seen.append(run.is_main)
            for _ in run.batches(DATA):
                run.step(loss())

    with pytest.warns(UserWarning, match="run.is_main is False in every worker before the first") as told:
        worker = Worker(main)
    assert {each.filename for each in told} == {__file__}
    seen.clear()
    worker.stand()
    assert seen == [True]


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        (
            {"strategy": "ddp", "lanes": 2},
            "strategy: ddp is not possible with a training loop of your own (counting())",
        ),
        ({"strategy": {"kind": "parameter-server", "mode": "asynchronous"}}, "strategy: parameter-server is not"),
        ({"on_bad_sample": "skip"}, "on_bad_sample: skip is not possible"),
        ({"on_out_of_memory": "shrink"}, "on_out_of_memory: shrink is not possible"),
        ({"compile": True}, "compile: true is not possible"),
    ],
    ids=str,
)
def test_what_cannot_hold_is_refused_by_name(keys: dict[str, Any], answer: str) -> None:
    with pytest.raises(QuorateError, match=re.escape(answer)):
        Worker(counting, **keys)


def test_a_last_batch_without_a_sample_for_each_lane_is_refused() -> None:
    with pytest.raises(QuorateError, match="has 2 samples for 3 lanes"):
        Worker(counting, lanes=3, batch_size=5, last_batch="keep").stand()


def in_batches(body: Main, after: Main = lambda _: None) -> Main:
    """A loop with this in its body, and this after an epoch."""

    def main(run: Run) -> None:
        prepared(run)
        for _ in run.epochs():
            for _ in run.batches(DATA):
                if body(run) is StopIteration:
                    break
            after(run)

    return main


def keeps_a_set(run: Run) -> None:
    if run.step(loss()) is not None:
        run.state["seen"] = {1}


def keeps_numbered(run: Run) -> None:
    if run.step(loss()) is not None:
        run.state["by"] = {1: 2}


def keeps_of_each_lane(run: Run) -> None:
    run.state["batches"] = run.state.get("batches", 0) + 1
    run.step(loss())


def fails(run: Run) -> None:
    raise ValueError("of one's own")


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (lambda run: (run.step(loss()), run.step(loss())), "it has had its step"),
        (lambda run: run.step(loss()) and StopIteration, "was left before its batches were read"),
        (lambda run: (run.step(loss()), list(run.batches(DATA))), "was left before its end"),
        (lambda run: (run.step(loss()), run.log("late", 1.0)), "belongs between a batch and its run.step(loss)"),
        (lambda run: run.evaluate(DATA, dict), "run.evaluate(dataset, measure) belongs before the loop"),
        (lambda run: run.clip(1.0), "run.clip(norm) belongs before the loop"),
        (lambda run: run.batches([1, 2, 3]), "was given 12 samples at first, and now another dataset of 3"),
        (lambda run: run.prepare(nn.Linear(1, 1), None), "run.prepare() was called twice"),
        (keeps_a_set, "run.state cannot be saved: Object of type set"),
        (keeps_numbered, "run.state would come back from a checkpoint as"),
        (keeps_of_each_lane, "run.state was changed where run.step() has given no result"),
        (fails, "ValueError: of one's own (in main())"),
    ],
)
def test_a_mistake_in_the_loop_ends_the_job_with_what_to_do(body: Main, answer: str) -> None:
    worker = Worker(in_batches(body)).stand()
    with pytest.raises(QuorateError, match=re.escape(answer)) as ended:
        worker.step(2)
    assert ended.value.exit_code == 1


def test_main_that_returns_early_or_never_is_told_so() -> None:
    def returns(run: Run) -> None:
        prepared(run)
        for _ in run.batches(DATA):
            if run.step(loss()) is not None:
                return

    with pytest.raises(QuorateError, match=re.escape("returns() returned before the job was done, which has 9 steps")):
        Worker(returns).stand().step(2)

    def goes_on(run: Run) -> None:
        prepared(run)
        while True:
            for _ in run.batches(DATA):
                run.step(loss())

    worker = Worker(goes_on).stand().step(9)
    with pytest.raises(QuorateError, match=r"All steps of the job are done, and goes_on\(\) asks for more"):
        worker.task.finish()


@pytest.mark.parametrize("main", [lambda: None, lambda run, *rest: None, lambda run, **rest: None])
def test_main_takes_run_and_then_params_by_their_names(main: Main) -> None:
    with pytest.raises(QuorateError, match="must take `run` first, and then the job's params by their names"):
        own_loop_of(main)


def test_params_of_the_job_are_what_main_takes() -> None:
    rates: list[float] = []

    def main(run: Run, rate: float, size: int = 3) -> None:
        rates.extend((rate, size))
        prepared(run)
        for _ in run.batches(DATA):
            run.step(loss())

    Worker(main, params={"rate": 0.5})
    assert rates == [0.5, 3]
    with pytest.raises(QuorateError, match="params"):
        Worker(main, params={"rate": 0.5, "sise": 4})
