"""The simulator from the command line: ``python -m simulation --seeds 10000``, or ``--seed 7`` for one of them."""

import argparse
import logging
import sys
import time
from collections import Counter

from simulation.mutants import MUTANTS, SOUND, WITH_SERVERS, Mutant
from simulation.schedules import PAIRS, Coverage
from simulation.simulation import Simulation, Verdict, shrink

_NAMED = 12
_BY_NAME = {mutant.name: mutant for mutant in (SOUND, *MUTANTS, *WITH_SERVERS)}


def main() -> int:
    """Simulate; 1 if an invariant does not hold."""
    options = _options()
    # Workers whose coordinator is away warn of it, in every other job.
    logging.getLogger("quorate").setLevel(logging.ERROR)
    mutant = _BY_NAME[options.mutant]
    if options.seed is not None:
        without = _numbers(options.without)
        verdict = Simulation(options.seed, mutant, without, servers=options.servers, traces=True).run()
        _print_trace(verdict)
        return int(verdict.broken is not None)
    return _simulate_many(options.first, options.seeds, mutant, options.servers)


def _simulate_many(first: int, seeds: int, mutant: Mutant, servers: int) -> int:
    began = time.perf_counter()
    endings: Counter[str] = Counter()
    steps = copies = generations = successions = deaths = 0
    coverage = Coverage()
    for seed in coverage.seeds(first, seeds):
        verdict = Simulation(seed, mutant, servers=servers).run()
        if verdict.broken is not None:
            print(f"seed {seed} breaks an invariant; with as few faults as still do:")
            least = shrink(seed, mutant, servers)
            _print_trace(least)
            print(f"again: {_command(least, mutant, servers)}")
            return 1
        endings[verdict.ending] += 1
        steps, copies = steps + verdict.steps, copies + verdict.copies
        generations, deaths = generations + verdict.generations, deaths + verdict.deaths
        successions += verdict.successions
        coverage.add(verdict.pairs)
    seconds = time.perf_counter() - began
    told = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    print(
        f"{seeds} seeds without a broken invariant in {seconds:.1f} s ({told}): {steps} steps at"
        f" {steps / seconds:.0f} a second, {generations} generations, {copies} copies, {deaths} workers"
        f" and {successions} coordinators ended"
    )
    print(f"{len(coverage.seen)} of {len(PAIRS)} pairs of an event and a fault during it were covered", end="")
    missing = [f"{fault} in {event}" for event, fault in coverage.missing]
    print(f"; not {', '.join(missing[:_NAMED])}{' …' if len(missing) > _NAMED else ''}" if missing else "")
    return 0


def _print_trace(verdict: Verdict) -> None:
    for line in verdict.trace:
        print(line)
    print(f"seed {verdict.seed}: {verdict.broken or f'every invariant holds; the job ended: {verdict.ending}'}")


def _command(verdict: Verdict, mutant: Mutant, servers: int) -> str:
    without = f" --without {','.join(map(str, verdict.without))}" if verdict.without else ""
    as_mutant = f" --mutant '{mutant.name}'" if mutant is not SOUND else ""
    with_servers = f" --servers {servers}" if servers else ""
    return f"{sys.executable} -m simulation --seed {verdict.seed}{with_servers}{without}{as_mutant}"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many jobs to simulate (default 1000)")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="from which seed on (default 0): even ones draw, of odd ones the best aims are taken",
    )
    parser.add_argument("--seed", type=int, help="replay this one, and print what happens")
    parser.add_argument("--servers", type=int, default=0, help="how many parameter servers the jobs have (default 0)")
    parser.add_argument("--without", default="", help="numbers of faults to leave out, such as 0,2")
    parser.add_argument("--mutant", default=SOUND.name, choices=list(_BY_NAME), help="build it with this mistake")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
