"""The command of the benchmarks, which are not installed."""

from pathlib import Path

from command import Running, Workplace

ROOT = Path(__file__).parents[2]


def start_benchmark(workplace: Workplace, *arguments: str, **environment: str) -> Running:
    """Give `python -m benchmarks` arguments, in a folder of a test's."""
    return workplace.start_module("benchmarks", *arguments, PYTHONPATH=str(ROOT), **environment)
