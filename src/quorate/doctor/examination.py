"""Carrying out checks: whatever one of them does, there is a finding, and soon."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quorate.core.errors import QuorateError
from quorate.core.user_code import describe
from quorate.doctor.finding import Finding, Level

PATIENCE = 10.0
REPORT_IT = "This check itself has failed; please report it."


@dataclass(frozen=True)
class Check:
    """A name, a look that may take some seconds, and how many at most."""

    name: str
    look: Callable[[], Sequence[Finding]]
    patience: float = PATIENCE


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """The findings of all checks, in their order; all are carried out at once."""
    looks = [_Look(check) for check in checks]
    for look in looks:
        yield from look.findings()


@dataclass
class _Look:
    """A check under way. Its thread is a daemon: one that hangs must not keep the command from ending."""

    check: Check
    found: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = time.monotonic() + self.check.patience
        self._thread = threading.Thread(target=self._carry_out, name=self.check.name, daemon=True)
        self._thread.start()

    def findings(self) -> list[Finding]:
        """Wait for the end of the check, as long as it may take."""
        self._thread.join(max(0.0, self._over - time.monotonic()))
        if self._thread.is_alive():
            text = f"nothing was found out within {self.check.patience:g} s"
            return [Finding(self.check.name, Level.PROBLEM, text, "Something here hangs; look at it by hand.")]
        return self.found

    def _carry_out(self) -> None:
        try:
            self.found = list(self.check.look())
        except QuorateError as error:  # which says what to do by itself
            self.found = [Finding(self.check.name, Level.PROBLEM, error.message)]
        except Exception as error:
            self.found = [Finding(self.check.name, Level.PROBLEM, f"cannot be checked: {describe(error)}", REPORT_IT)]
