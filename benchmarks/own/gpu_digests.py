"""One job on one GPU in every way that must not change its bits: workers, servers, a kill, a resume, an empty cache."""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.own.gpu_job import PATIENCE, GpuRun
from benchmarks.own.watched_run import await_sight
from benchmarks.told import answer, read_order, reading


def main() -> None:
    """Answer the launcher: seconds of each run, and how many different digests there were."""
    order = read_order()
    ways: dict[str, Callable[[dict[str, Any]], str]] = {
        **{f"{workers} workers": on_workers(workers) for workers in order["workers"]},
        "servers": on_servers,
        "killed": killed,
        "resumed": resumed,
        "empty compile cache": with_empty_cache,
    }
    digests, ms = {}, []
    for way, train in ways.items():
        began = time.monotonic()
        digests[way] = train(order)
        ms.append((time.monotonic() - began) * 1000)
        print(f"{order['case']}, {way}: {digests[way][:16]} after {ms[-1] / 1000:.0f} s", flush=True)
    different = sorted(set(digests.values()))
    details = {"digests": float(len(different)), "runs": float(len(digests))}
    # Which of them differ: by the number of their digest.
    details |= {f"digest of {way}": float(different.index(digest)) for way, digest in digests.items()}
    answer(reading(order["case"], max(order["workers"]), ms, details=details))


def on_workers(workers: int) -> Callable[[dict[str, Any]], str]:
    """Nothing happens to so many workers."""
    return lambda order: undisturbed(GpuRun(order, order["job"] | {"workers": workers}))


def on_servers(order: dict[str, Any]) -> str:
    """Two workers, whose parameters so many servers hold."""
    strategy = {"kind": "parameter-server", "servers": order["servers"]}
    return undisturbed(GpuRun(order, order["job"] | {"workers": 2, "strategy": strategy}))


def with_empty_cache(order: dict[str, Any]) -> str:
    """Everything is compiled anew."""
    with tempfile.TemporaryDirectory(dir=order["folder"], ignore_cleanup_errors=True) as fresh:
        return undisturbed(GpuRun(order, order["job"] | {"workers": 1}, Path(fresh)))


def undisturbed(run: GpuRun) -> str:
    """Train it to its end."""
    run.complete()
    return digest_of(run)


def killed(order: dict[str, Any]) -> str:
    """One of two workers, in the middle."""
    run = GpuRun(order, order["job"] | {"workers": 2})
    with run.started() as process:
        await_sight("both workers train", lambda: run.is_steady(2, 1), process, PATIENCE)
        run.await_step(order["job"]["steps"] // 3, process)
        os.kill(run.pids()[run.members()[-1]], signal.SIGKILL)
        run.await_end(process)
    if not run.result()["recoveries"]:
        raise SystemExit("the worker was killed too late: nothing had to recover")
    return digest_of(run)


def resumed(order: dict[str, Any]) -> str:
    """Stopped on one worker, resumed on another number of them."""
    run = GpuRun(order, order["job"] | {"workers": 1})
    with run.started() as process:
        run.await_step(order["job"]["steps"] // 3, process)
        process.terminate()
        process.wait()
    if (run.folder / "result.json").exists() and run.result()["status"] == "complete":
        raise SystemExit("the job was complete before it could be stopped")
    run.complete(run.resume(order["workers"][-1]))
    return digest_of(run)


def digest_of(run: GpuRun) -> str:
    """Of the weights of a run that is over, which is removed."""
    digest: str = run.result()["weights_digest"]
    run.remove()
    return digest


if __name__ == "__main__":
    main()
