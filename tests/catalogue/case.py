"""One mistake: what somebody wrote and typed, and the place where it is made."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from command import Workplace

SOUND = (Path(__file__).parent / "sound.py").read_text()
TASK = "from sound import *\n\nclass Mine(Sound):\n    pass\n"
JOB = """\
task: task.py:Mine
lanes: 2
batch_size: 8
steps: 4
workers: 1
checkpoint: {every: 2}
"""

Prepare = Callable[[Workplace], None]


@dataclass(frozen=True)
class Case:
    """A mistake and how to make it.

    `job` stands in the place of the usual lines of its keys, `without` are keys that are left out; `text` is a whole
    job file. `task` is the content of task.py. `story` tells what `prepare` has done. With `finished`, the usual run
    of eight steps is there already. `starts` says whether a process is started before the mistake shows.
    """

    title: str
    command: str = "quorate train job.yaml"
    job: str = ""
    without: tuple[str, ...] = ()
    text: str | None = None
    task: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    story: str = ""
    prepare: Prepare | None = None
    finished: bool = False
    starts: bool = False

    @property
    def job_file(self) -> str:
        """What stands in job.yaml."""
        if self.text is not None:
            return self.text
        given = {*re.findall(r"^(\w+):", self.job, re.MULTILINE), *self.without}
        usual = [line for line in JOB.splitlines() if line.partition(":")[0] not in given]
        return "\n".join([*usual, self.job.rstrip("\n")]).rstrip("\n") + "\n"

    def set_up(self, workplace: Workplace) -> None:
        """Write the files, and do what the story tells."""
        (workplace.folder / "sound.py").write_text(SOUND)
        workplace.task.write_text(self.task or TASK)
        workplace.job.write_text(self.job_file)
        if self.prepare is not None:
            self.prepare(workplace)

    @property
    def arguments(self) -> list[str]:
        """What is typed, for the machine: progress is left out, and a document is asked for."""
        verb, *rest = self.command.removeprefix("quorate ").split()
        quiet = ["--quiet"] if verb in ("train", "resume") else []
        return [verb, *rest, *quiet, "--json"]
