"""The three ported scripts, with workers killed by SIGKILL in the middle: the digest of one undisturbed worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from command import Workplace
from examples.test_ported import KEYS, PORTED
from trial import firings, recovered, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.usefixtures("unmeasured")]


@pytest.fixture(scope="module", params=KEYS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A folder in which the script has run undisturbed, on one worker."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    text = folder / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEXT", str(text))
        source = (PORTED / f"{request.param}.py").read_text()
        keys = KEYS[request.param] | {"task": "task.py:main", "workers": 1}
        with undisturbed_in(folder, source, **keys) as found:
            yield found


@pytest.mark.parametrize("workers", [2, 3])
def test_a_killed_worker_leaves_the_bits_as_they_are(place: Workplace, workers: int) -> None:
    total = place.result()["steps"]
    middle = total // 2
    faults = [
        f"kill worker {workers - 1} at step {middle} in forward",
        f"kill worker 0 at step {total - 1} in exchange",
    ]
    document = recovered(place, *faults, settings=(f"workers={workers}",))
    assert firings(document, faults[0]) == [(middle, "forward")]
    assert firings(document, faults[1]) == [(total - 1, "exchange")]
