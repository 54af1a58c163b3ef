"""The memory of gradients: given back before the next generation takes its own; a worker that gets none is replaced."""

import os
import signal

import pytest

from cli.test_deaths import PROMPTLY, lost
from command import TASK_SOURCE, Workplace

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

# What a worker maps of earlier gradients whenever it asks for memory for new ones; and one time there is none.
WATCHING = """
import gc

gc.disable()  # what is to be gone may not wait for it
reserve = os.posix_fallocate


def watch(descriptor, offset, size):
    if "memfd:quorate" in os.readlink(f"/proc/self/fd/{descriptor}"):
        mapped = Path("/proc/self/maps").read_text().count("memfd:quorate")
        with Path("asked").open("a") as file:
            file.write(f"{os.getpid()} {mapped}\\n")
        try:
            Path("shortage").unlink()
        except FileNotFoundError:
            pass  # there is none, or it is another's
        else:
            raise OSError(12, "Cannot allocate memory")
    reserve(descriptor, offset, size)


os.posix_fallocate = watch
"""


def test_a_generation_takes_no_memory_before_the_last_has_given_back_its_own(
    workplace: Workplace, undisturbed: str
) -> None:
    """Two workers are left of three; one of these finds no memory for the next generation, and is replaced as well."""
    workplace.task.write_text(TASK_SOURCE + WATCHING)
    running = workplace.start("train", "job.yaml", "--workers", "3", "--json", HOLD="6")
    running.await_event("step", at_least=2)
    before = workplace.workers()
    (workplace.folder / "shortage").touch()
    os.kill(before[1], signal.SIGKILL)
    workplace.go()
    done = running.done(within=PROMPTLY)
    assert done.code == 0, done.error
    assert done.document["weights_digest"] == undisturbed
    asked = [tuple(map(int, line.split())) for line in (workplace.folder / "asked").read_text().splitlines()]
    again = [pid for pid, _ in asked[4:] if pid in before]  # four times in the first, for three lanes' memory and a sum
    assert again, "somebody has seen a second generation"
    assert {mapped for _, mapped in asked} == {0}
    assert not (workplace.folder / "shortage").exists()
    first, second = lost(workplace)
    assert "was killed by SIGKILL" in first["message"]
    assert "gave up at step" in second["message"]
    assert "not enough memory for the" in second["message"]
    workplace.assert_nobody_left()
