"""How options of the command line become a fault script."""

from dataclasses import dataclass
from pathlib import Path

from quorate.chaos.fault import Fault
from quorate.chaos.network_namespaces import can_make_networks
from quorate.chaos.script import EXAMPLE, Line, check_script, lines_of, parse_mean, parse_script, random_script
from quorate.core.errors import RequestError


@dataclass(frozen=True)
class FaultWish:
    """Written faults; or, with a mean number of steps between two of them, random ones."""

    written: tuple[Fault, ...]
    mean: float | None = None
    seed: int = 0

    def script(
        self,
        workers: int,
        steps: int | None,
        lanes: int,
        saves_every: int | None = None,
        *,
        has_loaders: bool = False,
    ) -> tuple[Fault, ...]:
        """The faults for a job of so many workers, steps and lanes. Random ones need to know how many steps there are.

        They cut workers off where this process can make networks for that.
        """
        if self.mean is None:
            check_script(self.written, workers, steps, lanes)
            return self.written
        can_cut = can_make_networks()
        if steps is None:
            return ()
        faults = random_script(
            self.seed,
            steps,
            workers,
            self.mean,
            lanes,
            can_cut=can_cut,
            saves_every=saves_every,
            has_loaders=has_loaders,
        )
        if not faults:
            raise RequestError(
                f"--mtbf is {self.mean:g} steps and the job has {steps}: with --seed {self.seed} it ends before the "
                "first fault. Give a smaller --mtbf, or another --seed."
            )
        return faults


def wish_for(
    texts: list[str] | None, script: Path | None, random: bool, mtbf: str | None, seed: int | None
) -> FaultWish:
    """What was asked for, checked as far as that goes without the job."""
    if random:
        if texts or script:
            raise RequestError("--random makes the faults itself: leave out --fault and --script, or --random.")
        if mtbf is None:
            raise RequestError("--random needs to know how often: add --mtbf, such as --mtbf 20steps or --mtbf 5s.")
        return FaultWish((), parse_mean(mtbf), seed or 0)
    if mtbf is not None:
        raise RequestError("--mtbf is for --random, which is not given: add it, or leave out --mtbf.")
    if seed is not None:
        raise RequestError(
            f"--seed is that of --random, which is not given. The seed of the job is set with --set seed={seed}"
        )
    lines = [Line(text, "--fault") for text in texts or ()] + ([] if script is None else _read(script))
    if not lines:
        raise RequestError(
            f'no fault is given: write --fault "{EXAMPLE}", --script FILE with one such line for each fault, or '
            "--random --mtbf 5s."
        )
    return FaultWish(parse_script(lines))


def _read(script: Path) -> list[Line]:
    try:
        return lines_of(script.read_text(), str(script))
    except OSError as error:
        raise RequestError(f"cannot read the fault script {script}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise RequestError(f"the fault script {script} is not text in UTF-8.") from None
