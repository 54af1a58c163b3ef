"""A job that is not tracked loads none of the libraries that trackers need, in none of its processes."""

import re

from command import Workplace
from warm import cold

# Not pynvml: torch asks for it itself.
FOREIGN = {"mlflow", "prometheus_client", "opentelemetry", "wandb", "tensorboard", "psutil", "matplotlib"}
TRACKERS = {"quorate.tracking.mlflow_client", "quorate.api.tracker"}


def imported(text: str) -> set[str]:
    """The modules that Python says to have imported, with PYTHONPROFILEIMPORTTIME."""
    return set(re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", text, re.MULTILINE))


def test_no_process_of_a_job_that_is_not_tracked_loads_them(workplace: Workplace) -> None:
    with cold():
        done = workplace.train("--workers", "2", PYTHONPROFILEIMPORTTIME="1")
    assert done.code == 0, done.stderr
    by_process = {"launcher": imported(done.stderr)}
    by_process["coordinator"] = imported((workplace.last / "logs" / "coordinator.log").read_text())
    for name in ("fork_server", "worker-0", "worker-1"):
        by_process[name] = imported(workplace.log(name))
    assert "quorate.api.session" in by_process["launcher"]
    assert "quorate.coordinator.service" in by_process["coordinator"]
    assert "quorate.worker.session" in by_process["fork_server"], "which workers are forked from"
    assert "numpy" not in by_process["launcher"], "which writes the index of a long run without it"
    assert not {module for module in by_process["launcher"] if module.startswith("quorate.tracking")}
    for process, modules in by_process.items():
        found = {module for module in modules if module.partition(".")[0] in FOREIGN or module in TRACKERS}
        assert not found, f"{process} loads {sorted(found)}"
