import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from made_events import make_event
from quorate.observe.console import Bundle, NotebookConsole, notebook_display
from quorate.observe.event import Event
from quorate.observe.progress import Progress

BEGIN = make_event("run", None, {"from_step": 0, "total_steps": 9_000})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """Everything that a display was asked to show."""

    def __init__(self) -> None:
        self.bundles: list[Bundle] = []

    def __call__(self, bundle: Bundle) -> None:
        self.bundles.append(bundle)

    @property
    def last(self) -> list[str]:
        return self.bundles[-1]["text/plain"].splitlines()


def step(number: int) -> Event:
    return make_event("step", number, {"loss": 1.0 / number, "samples": 8}, time=float(number))


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def console(shown: Shown, clock: Clock) -> NotebookConsole:
    return NotebookConsole(shown, Progress("job-0001", "runs/job-0001", workers=2, lanes=4, clock=clock), clock)


def test_the_run_its_latest_notices_and_the_numbers_are_shown(console: NotebookConsole, shown: Shown) -> None:
    assert shown.last == ["starting job-0001: 4 lanes on 2 workers ...   1 s elapsed"]
    console.handle(BEGIN)
    for number in range(1, 21):
        console.handle(step(number))
        console.handle(make_event("evaluation", number, {"metrics": {"loss": 0.5}}))
    assert shown.last[0] == "job-0001 in runs/job-0001: 4 lanes on 2 workers"
    assert shown.last[1:-1] == [f"evaluation at step {number}: loss 0.5000" for number in range(13, 21)]
    assert (
        shown.last[-1] == "step 20/9,000   loss 0.05000   eval loss 0.5000   8 samples/s   1 s elapsed   2:29:40 left"
    )
    assert '<progress value="20" max="9000">' in shown.bundles[-1]["text/html"]


def test_fast_steps_do_not_flood_the_notebook(console: NotebookConsole, shown: Shown, clock: Clock) -> None:
    console.handle(BEGIN)
    before = len(shown.bundles)
    for number in range(1, 5_001):
        console.handle(step(number))
        clock.now += 1e-4
    assert len(shown.bundles) - before <= 2
    console.close()
    assert shown.last[-1] == "step 5,000/9,000   loss 0.0002000   8 samples/s   1 s elapsed"  # over: no time is left


def test_a_message_is_text_and_no_markup(console: NotebookConsole, shown: Shown) -> None:
    console.handle(make_event("log", None, {"message": "<script>1 & 2</script>"}))
    assert "<div>&lt;script&gt;1 &amp; 2&lt;/script&gt;</div>" in shown.bundles[-1]["text/html"]
    assert "<script>1 & 2</script>" in shown.last


def test_the_summary_takes_the_place_of_the_progress(console: NotebookConsole, shown: Shown) -> None:
    console.summarise({"run": "job-0001", "status": "complete", "steps": 12, "final_metrics": {"accuracy": 0.5}})
    assert shown.last == ["run       job-0001", "status    complete", "accuracy  0.5000", "steps     12"]
    assert "<tr><th>accuracy</th><td>0.5000</td></tr>" in shown.bundles[-1]["text/html"]


class TestTheDisplay:
    def in_a_kernel(self, monkeypatch: pytest.MonkeyPatch, shell: Any) -> list[Any]:
        """Stand in for IPython; what was sent to the notebook."""
        sent: list[Any] = []

        def display(bundle: Bundle, **options: Any) -> Any:
            sent.append(("display", bundle, options))
            return SimpleNamespace(update=lambda bundle, **options: sent.append(("update", bundle, options)))

        ipython, displays = ModuleType("IPython"), ModuleType("IPython.display")
        vars(ipython)["get_ipython"] = lambda: shell
        vars(displays)["display"] = display
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", displays)
        return sent

    def test_is_one_place_that_is_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sent = self.in_a_kernel(monkeypatch, SimpleNamespace(kernel=object()))
        display = notebook_display()
        assert display is not None
        display({"text/plain": "a"})
        display({"text/plain": "b"})
        assert sent == [
            ("display", {"text/plain": "a"}, {"raw": True, "display_id": True}),
            ("update", {"text/plain": "b"}, {"raw": True}),
        ]

    @pytest.mark.parametrize("shell", [None, SimpleNamespace()], ids=["imported only", "in a terminal"])
    def test_is_none_outside_a_notebook(self, monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
        self.in_a_kernel(monkeypatch, shell)
        assert notebook_display() is None

    def test_is_none_without_ipython(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
        assert notebook_display() is None
        assert "IPython" not in sys.modules
