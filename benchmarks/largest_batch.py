"""The largest batch size that fits, by as few attempts as doubling and halving need."""

from collections.abc import Callable
from typing import NamedTuple

_CLOSE = 0.03
"""Share of the size that is not worth another attempt."""
_GRAIN = 16


class Found(NamedTuple):
    """What is known at the end."""

    fits: int | None
    """The largest that was seen to fit; None: none did."""
    fails: int | None
    """The smallest that was seen not to; None: all that were allowed fitted."""


def largest_batch(fits: Callable[[int], bool], *, first: int, most: int, expired: Callable[[], bool]) -> Found:
    """Double from ``first`` on while it fits (halve while it does not), then halve in between.

    Args:
        fits: whether a batch size does. Asked once for each.
        first: where to begin.
        most: never ask for more.
        expired: whether no further attempt is to begin.
    """
    found, size = Found(None, None), min(first, most)
    while not expired():
        found = found._replace(fits=size) if fits(size) else found._replace(fails=size)
        if found.fails is None:
            if size == most:
                break
            size = min(2 * size, most)
        elif found.fits is None:
            if size == 1:
                break
            size //= 2
        else:
            grain = _GRAIN if found.fails - found.fits > 2 * _GRAIN else 1
            if found.fails - found.fits <= max(1, int(_CLOSE * found.fits)):
                break
            size = (found.fits + found.fails) // 2 // grain * grain
    return found
