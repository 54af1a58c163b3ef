"""The trials of a search, as Ray Tune asks for them."""

from typing import Any

from ray.tune.search import Searcher

from quorate.tune.trial_source import TrialSource


class RaySearcher(Searcher):  # type: ignore[misc] # Ray has no types here
    """Gives Tune as many trials as may run at a time."""

    def __init__(self, source: TrialSource, limit: int | None) -> None:
        super().__init__()
        self.source = source
        self._limit = limit
        self._live: dict[str, int] = {}
        self._paused: set[str] = set()

    def pause(self, trial_id: str, is_paused: bool = True) -> None:
        """A paused trial leaves its place to another."""
        (self._paused.add if is_paused else self._paused.discard)(trial_id)

    @property
    def has_room(self) -> bool:
        """Whether one more may run."""
        return self._limit is None or len(self._live.keys() - self._paused) < self._limit

    def suggest(self, trial_id: str) -> Any:
        if not self.source.has_more:
            # To Tune, the end of proposals is the end of actors that nobody has a trial for: of a paused one, too.
            return None if self._paused and not self.source.is_over else Searcher.FINISHED
        if not self.has_room:
            return None
        number, params = self.source.next()
        self._live[trial_id] = number
        return {"trial": number, "params": params}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:  # noqa: ARG002
        number = self._live.pop(trial_id, None)
        self._paused.discard(trial_id)
        if number is not None:
            self.source.ended(number)

    def save(self, checkpoint_path: str) -> None: ...

    def restore(self, checkpoint_path: str) -> None: ...
