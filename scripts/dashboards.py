"""Writes the Grafana dashboards in deploy/grafana/dashboards.

::

    .venv-services/bin/python scripts/dashboards.py

It needs grafana-foundation-sdk, of the extra `services`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
)

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="quorate-prometheus")
RUNS = 'run=~"$run"'
"""What every query selects by: the runs that are chosen at the top of a dashboard."""

SECONDS, BYTES, BYTE_RATE, SHARE, RATE, PLAIN = "s", "bytes", "Bps", "percentunit", "short", "none"
_WIDE, _NARROW = 12, 4


@dataclass(frozen=True)
class Panel:
    """A curve over time, or with `is_stat` the number of now. Queries are by the legend of their curves."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str
    is_stat: bool = False


@dataclass(frozen=True)
class Board:
    """A dashboard: rows of panels."""

    name: str
    title: str
    rows: dict[str, tuple[Panel, ...]]


def selected(metric: str, more: str = "") -> str:
    """The series of a metric that belong to the chosen runs."""
    return f"{metric}{{{RUNS}{', ' + more if more else ''}}}"


def rate(metric: str, more: str = "") -> str:
    """How fast a counter grows, per second."""
    return f"rate({selected(metric, more)}[$__rate_interval])"


def mean(histogram: str, by: str) -> str:
    """The mean of what a histogram has seen lately."""
    total, count = (f"sum by ({by}) ({rate(f'{histogram}_{part}')})" for part in ("sum", "count"))
    return f"{total} / {count}"


def quantile(part: float, histogram: str, by: str) -> str:
    """Below which so large a part of what a histogram has seen lately lies."""
    return f"histogram_quantile({part}, sum by (le, {by}) ({rate(f'{histogram}_bucket')}))"


def _now(title: str, unit: str, query: str, description: str) -> Panel:
    return Panel(title, unit, {"{{run}}": query}, description, is_stat=True)


CLUSTER = Board(
    "cluster",
    "Quorate: cluster overview",
    {
        "Jobs": (
            _now("Jobs that run", PLAIN, "sum(quorate_up)", "Of all runs, chosen or not."),
            _now(
                "Progress",
                SHARE,
                f"{selected('quorate_last_step')} / {selected('quorate_planned_steps')}",
                "Steps done.",
            ),
            _now("Workers alive", PLAIN, selected("quorate_workers", 'state="alive"'), "Members of the generation."),
            _now("Workers wanted", PLAIN, selected("quorate_workers", 'state="wanted"'), "What the job asks for."),
            _now("Generation", PLAIN, selected("quorate_generation"), "It grows with every loss, return and resize."),
            _now(
                "Since it got any further",
                SECONDS,
                f"time() - {selected('quorate_progress_timestamp_seconds')}",
                "By a step, an evaluation or a checkpoint.",
            ),
        ),
        "Throughput": (
            Panel("Samples per second", RATE, {"{{run}}": rate("quorate_samples_total")}, "Mean of the last minutes."),
            Panel("Steps per second", RATE, {"{{run}}": rate("quorate_steps_total")}, "Mean of the last minutes."),
        ),
        "Losses of workers": (
            Panel(
                "Workers",
                PLAIN,
                {"{{run}} {{state}}": selected("quorate_workers")},
                "Alive below wanted: places that are empty.",
            ),
            Panel(
                "Lost, by cause",
                PLAIN,
                {"{{run}} {{cause}}": f"increase({selected('quorate_workers_lost_total')}[$__rate_interval])"},
                "Losses within the interval of a point.",
            ),
            Panel(
                "Recovered, by cause",
                PLAIN,
                {"{{run}} {{cause}}": f"increase({selected('quorate_recoveries_total')}[$__rate_interval])"},
                "Losses after which a new step was completed.",
            ),
            Panel(
                "Seconds to recover",
                SECONDS,
                {
                    "{{run}}": f"sum by (run, run_id) ({selected('quorate_recovery_seconds_sum')})"
                    f" / (sum by (run, run_id) ({selected('quorate_recovery_seconds_count')}) > 0)"
                },
                "From the first sign of a loss to the next new step; mean of all so far.",
            ),
        ),
    },
)

TRAINING = Board(
    "training",
    "Quorate: training",
    {
        "Now": (
            _now("Step", PLAIN, selected("quorate_last_step"), "The last that is complete."),
            _now("Epoch", PLAIN, selected("quorate_epoch"), "From 0."),
            _now("Loss", RATE, selected("quorate_loss"), "Of the last step."),
            _now("Samples per second", RATE, rate("quorate_samples_total"), "Mean of the last minutes."),
            _now("Skipped steps", PLAIN, selected("quorate_steps_skipped_total"), "Their loss was not finite."),
            _now("Bad samples", PLAIN, selected("quorate_bad_samples_total"), "Left out as unreadable."),
        ),
        "Curves": (
            Panel("Training loss", RATE, {"{{run}} {{optimizer}}": selected("quorate_loss")}, "Of each step."),
            Panel(
                "Validation", RATE, {"{{run}} {{metric}}": selected("quorate_validation_metric")}, "Last evaluation."
            ),
            Panel("Logged", RATE, {"{{run}} {{name}}": selected("quorate_logged")}, "By the task, with self.log."),
            Panel("Learning rate", RATE, {"{{run}} {{optimizer}}": selected("quorate_learning_rate")}, "Of each step."),
            Panel("Gradient norm", RATE, {"{{run}} {{optimizer}}": selected("quorate_gradient_norm")}, "Of each step."),
            Panel("Loss scale", PLAIN, {"{{run}}": selected("quorate_loss_scale")}, "Of jobs in fp16."),
            Panel(
                "Steps that overflowed",
                PLAIN,
                {"{{run}}": selected("quorate_steps_overflowed_total")},
                "Their gradients were too large for float16; no weight was changed.",
            ),
        ),
        "Where the time goes": (
            Panel(
                "Seconds of a step",
                SECONDS,
                {
                    "{{run}} mean": mean("quorate_step_seconds", "run, run_id"),
                    "{{run}} 95 %": quantile(0.95, "quorate_step_seconds", "run, run_id"),
                },
                "In the worker that hosts lane 0.",
            ),
            Panel(
                "Seconds by phase",
                SECONDS,
                {"{{run}} {{phase}}": mean("quorate_phase_seconds", "run, run_id, phase")},
                "Mean of a step: waiting for data, computing gradients, exchanging them, applying the update.",
            ),
            Panel(
                "Share of waiting for data",
                SHARE,
                {"{{run}}": f"{rate('quorate_data_wait_seconds_total')} / {rate('quorate_step_seconds_sum')}"},
                "Of the worker that had its data last; the alert is at 25 %.",
            ),
        ),
    },
)

EXCHANGE = Board(
    "exchange",
    "Quorate: exchange",
    {
        "Exchange": (
            Panel(
                "Bytes from each worker to others",
                BYTE_RATE,
                {"{{run}} worker {{worker}}": rate("quorate_exchange_bytes_total")},
                "Gradients, over links or in shared memory.",
            ),
            Panel(
                "Bandwidth of the exchange",
                BYTE_RATE,
                {
                    "{{run}}": f"sum by (run, run_id) ({rate('quorate_exchange_bytes_total')}) / sum by (run, run_id) ("
                    + rate("quorate_phase_seconds_sum", 'phase="exchange"')
                    + ")"
                },
                "Bytes of all workers, per second that steps waited for the exchange. More than the links carry,"
                " where the exchange overlaps with the backward pass.",
            ),
            Panel(
                "Round trip to the next worker",
                SECONDS,
                {"{{run}} {{worker}} to {{peer}}": selected("quorate_link_latency_seconds")},
                "Measured when the generation began.",
            ),
            Panel(
                "Share of the exchange in a step",
                SHARE,
                {
                    "{{run}}": rate("quorate_phase_seconds_sum", 'phase="exchange"')
                    + f" / ignoring (phase) {rate('quorate_step_seconds_sum')}"
                },
                "Also the waiting for slower workers. The alert is at 50 %.",
            ),
            Panel(
                "Seconds of the exchange",
                SECONDS,
                {
                    f"{{{{run}}}} {part:.0%}": f"histogram_quantile({part}, sum by (le, run, run_id) ("
                    + rate("quorate_phase_seconds_bucket", 'phase="exchange"')
                    + "))"
                    for part in (0.5, 0.95)
                },
                "Median and 95 % of the steps.",
            ),
            Panel(
                "Generation",
                PLAIN,
                {
                    "{{run}}": selected("quorate_generation"),
                    "{{run}} coordinator": selected("quorate_coordinator_number"),
                },
                "Links are made anew in each.",
            ),
            Panel(
                "Late updates",
                PLAIN,
                {
                    "{{run}} mean": mean("quorate_staleness_updates", "run, run_id"),
                    "{{run}} 95 %": quantile(0.95, "quorate_staleness_updates", "run, run_id"),
                },
                "Updates of others between the pull and the push of a unit of work: strategy.mode bounded or"
                " asynchronous.",
            ),
            Panel(
                "Steps ahead",
                PLAIN,
                {"{{run}}": selected("quorate_staleness_gap_steps")},
                "Of the oldest unapplied one, at which a unit was begun since the last boundary, at most.",
            ),
            Panel(
                "Parameter servers",
                PLAIN,
                {
                    "{{run}} servers": selected("quorate_servers"),
                    "{{run}} {{server}} blocks": selected("quorate_server_blocks"),
                },
                "How many hold parameters, and how many parameters each holds, replicas included.",
            ),
            Panel(
                "Parameters of a server",
                BYTES,
                {"{{run}} {{server}}": selected("quorate_server_bytes")},
                "Bytes of the parameters that each server holds, replicas included.",
            ),
        ),
    },
)

GPUS = Board(
    "gpus",
    "Quorate: GPUs",
    {
        "GPUs": (
            Panel("Use", SHARE, {"{{host}} {{gpu}}": selected("quorate_gpu_use_ratio")}, "The alert is below 10 %."),
            Panel(
                "Memory",
                SHARE,
                {
                    "{{host}} {{gpu}}": f"{selected('quorate_gpu_memory_used_bytes')}"
                    f" / {selected('quorate_gpu_memory_total_bytes')}"
                },
                "In use, with what PyTorch keeps for later.",
            ),
            Panel(
                "Memory in use",
                BYTES,
                {"{{host}} {{gpu}}": selected("quorate_gpu_memory_used_bytes")},
                "With what PyTorch keeps for later.",
            ),
            Panel(
                "Memory of workers",
                SHARE,
                {
                    "{{run}} {{worker}} tensors": f"{selected('quorate_worker_gpu_memory_bytes')}"
                    f" / {selected('quorate_worker_gpu_memory_total_bytes')}",
                    "{{run}} {{worker}} reserved": f"{selected('quorate_worker_gpu_memory_reserved_bytes')}"
                    f" / {selected('quorate_worker_gpu_memory_total_bytes')}",
                },
                "The most since the last sample, of the GPU that each computes on. Graphs use what is reserved.",
            ),
            Panel(
                "Temperature",
                "celsius",
                {"{{host}} {{gpu}}": selected("quorate_gpu_temperature_celsius")},
                "The alert is above 85 °C.",
            ),
            Panel("Power", "watt", {"{{host}} {{gpu}}": selected("quorate_gpu_power_watts")}, "What it draws."),
        ),
    },
)

CHECKPOINTS = Board(
    "checkpoints",
    "Quorate: checkpoints",
    {
        "Now": (
            _now(
                "Age of the last",
                SECONDS,
                f"time() - ({selected('quorate_checkpoint_timestamp_seconds')} > 0)",
                "What would be lost if all workers died now.",
            ),
            _now("Step of the last", PLAIN, selected("quorate_checkpoint_step"), "Where `quorate resume` goes on."),
            _now("Size", BYTES, selected("quorate_checkpoint_bytes"), "Of the last."),
            _now("Saved", PLAIN, selected("quorate_checkpoints_total"), "Since the launcher was started."),
            _now("Failed", PLAIN, selected("quorate_checkpoint_failures_total"), "Training goes on without them."),
            _now("Failed copies", PLAIN, selected("quorate_checkpoint_copy_failures_total"), "They are tried again."),
        ),
        "Saves": (
            Panel(
                "Seconds of a save",
                SECONDS,
                {
                    "{{run}}": f"{selected('quorate_checkpoint_seconds_sum')}"
                    f" / ({selected('quorate_checkpoint_seconds_count')} > 0)"
                },
                "Mean of all so far, from its beginning to its commit; training goes on meanwhile.",
            ),
            Panel(
                "Share of time that training waits for saves",
                SHARE,
                {"{{run}}": rate("quorate_checkpoint_wait_seconds_total")},
                "For what cannot be done beside it.",
            ),
            Panel(
                "Saved and failed",
                PLAIN,
                {
                    "{{run}} saved": selected("quorate_checkpoints_total"),
                    "{{run}} failed": selected("quorate_checkpoint_failures_total"),
                },
                "Since the launcher was started.",
            ),
            Panel(
                "Copies at further places", PLAIN, {"{{run}}": selected("quorate_checkpoint_copies_total")}, "By `to`."
            ),
        ),
    },
)

SYSTEM = Board(
    "system",
    "Quorate: system health",
    {
        "Machines": (
            Panel("CPU", SHARE, {"{{host}}": selected("quorate_machine_cpu_ratio")}, "Of all cores."),
            Panel(
                "Memory",
                SHARE,
                {
                    "{{host}}": f"{selected('quorate_machine_memory_used_bytes')}"
                    f" / {selected('quorate_machine_memory_total_bytes')}"
                },
                "Of the machine, or of its container. The alert is above 92 %.",
            ),
            Panel(
                "Network",
                BYTE_RATE,
                {
                    "{{host}} received": rate("quorate_machine_network_received_bytes_total"),
                    "{{host}} sent": rate("quorate_machine_network_sent_bytes_total"),
                },
                "Without loopback.",
            ),
            Panel(
                "Disks",
                BYTE_RATE,
                {
                    "{{host}} read": rate("quorate_machine_disk_read_bytes_total"),
                    "{{host}} written": rate("quorate_machine_disk_written_bytes_total"),
                },
                "All disks of the machine.",
            ),
            Panel(
                "Free space",
                SHARE,
                {
                    "{{host}}": f"{selected('quorate_machine_disk_free_bytes')}"
                    f" / {selected('quorate_machine_disk_total_bytes')}"
                },
                "Of the disk with the run folder. The alert is below 10 %.",
            ),
        ),
        "Workers": (
            Panel(
                "CPU",
                PLAIN,
                {"{{run}} {{worker}}": selected("quorate_worker_cpu_ratio")},
                "Of each process; 1 is one core.",
            ),
            Panel(
                "Memory", BYTES, {"{{run}} {{worker}}": selected("quorate_worker_memory_bytes")}, "That is resident."
            ),
            Panel("Threads", PLAIN, {"{{run}} {{worker}}": selected("quorate_worker_threads")}, "Of each process."),
        ),
        "Observation": (
            Panel("Jobs that run", PLAIN, {"{{run}} {{instance}}": selected("quorate_up")}, "0 once a job has ended."),
            Panel(
                "Seconds of a scrape",
                SECONDS,
                {"{{job}} {{instance}}": f"scrape_duration_seconds and on (instance, job) {selected('quorate_up')}"},
                "What reading the metrics takes.",
            ),
            Panel(
                "Events missed", PLAIN, {"{{run}}": selected("quorate_events_dropped_total")}, "By these metrics only."
            ),
        ),
    },
)

BOARDS = (CLUSTER, TRAINING, EXCHANGE, GPUS, CHECKPOINTS, SYSTEM)


def queries() -> Iterator[tuple[str, str, str]]:
    """Every query, with its dashboard and panel."""
    for board in BOARDS:
        for row in board.rows.values():
            for panel in row:
                for query in panel.queries.values():
                    yield board.name, panel.title, query


def text(board: Board) -> str:
    """The content of a dashboard's file."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(f"quorate-{board.name}")
        .tags(["quorate"])
        .readonly()
        .refresh("5s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Quorate")
            .type(DashboardLinkType.DASHBOARDS)
            .include_vars(True)
            .tags(["quorate"])
            .as_dropdown(True)
            .keep_time(True)
        )
        .with_variable(
            dashboard.QueryVariable("run")
            .label("Run")
            .datasource(SOURCE)
            .query("label_values(quorate_job_info, run)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
        )
    )
    for title, panels in board.rows.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(_built(panel))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _built(panel: Panel) -> "stat.Panel | timeseries.Panel":
    if panel.is_stat:
        last = common.ReduceDataOptions().calcs(["lastNotNull"])
        built = stat.Panel().height(4).span(_NARROW).graph_mode(BigValueGraphMode.NONE).reduce_options(last)
    else:
        built = timeseries.Panel().height(8).span(_WIDE)
    built = built.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    for number, (legend, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number))
        built = built.with_target(target.instant() if panel.is_stat else target.range())
    return built


def main() -> None:
    """Write all files, and remove what is none of them."""
    TARGET.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (TARGET / f"{board.name}.json").write_text(text(board))
    for file in TARGET.glob("*.json"):
        if file.stem not in {board.name for board in BOARDS}:
            file.unlink()


if __name__ == "__main__":
    main()
