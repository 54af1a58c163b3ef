"""Runs that are tracked, on machines that may be too busy to do so in time."""

from command import Done, Workplace

TOLD = "To send the rest: quorate track"


def train_tracked(place: Workplace, *arguments: str, **environment: str) -> Done:
    """Train the job file until its trackers have all of the run."""
    done = place.train(*arguments, **environment)
    assert done.code == 0, done.stderr
    if TOLD in done.stderr:
        catch_up(place)
    return done


def catch_up(place: Workplace) -> None:
    """As the launcher says where something is missing. What a tracker has already must not be there twice."""
    done = place.run("track", "last")
    assert done.code == 0, done.stdout + done.stderr
