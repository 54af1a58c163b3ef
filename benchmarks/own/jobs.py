"""Jobs of Quorate, as a user starts them, and the time that their steps take."""

from pathlib import Path
from typing import Any

from benchmarks.blocks import Blocks
from benchmarks.step_events import StepTimes, read_steps, step_times
from quorate.api.job import Job
from quorate.api.train import train

TASK = "benchmarks.tasks:CaseTask"
LOOP = "benchmarks.tasks:case_loop"


def train_case(folder: str, case: str, samples: int, blocks: Blocks, **keys: Any) -> StepTimes:
    """Train a case as `quorate train` does, and read the run's own events."""
    job = Job(
        task=keys.pop("task", TASK),
        name=f"bench-{case}",
        params={"case": case, "samples": samples},
        runs=str(Path(folder) / "runs"),
        steps=blocks.total,
        log_level="warning",
        **keys,
    )
    result = train(job, progress=False)
    return step_times(read_steps(result.folder / "events.jsonl"), blocks)
