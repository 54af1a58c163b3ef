"""A word on the command line that has to be one of a few."""

from enum import StrEnum
from typing import TypeVar

from quorate.core.errors import RequestError

Words = TypeVar("Words", bound=StrEnum)


def one_word(given: str, words: type[Words], option: str) -> Words:
    """The word that was given; a mistake is told with all that are allowed and the nearest."""
    if given in list(words):
        return words(given)
    from quorate.spec.keys import nearest, one_of

    allowed = [word.value for word in words]
    meant = nearest(given.lower(), allowed)
    hint = f" Did you mean {meant[0]}?" if meant else ""
    raise RequestError(f"{option}: {given!r} is not one of {one_of(allowed)}.{hint}")
