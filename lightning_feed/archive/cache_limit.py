"""How much memory a cache may take, as users write it."""

import re

from lightning_feed.errors import SettingsError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_limit(limit: int | str, available: int | None) -> int:
    """Bytes of a limit such as ``"50%"`` (of ``available``), ``"8GiB"``, ``"500 MB"`` or ``8_000_000``.

    Raises:
        SettingsError: when it is none of these, is nothing, or is a share of an amount that is not known.

    Example:
        >>> parse_limit("50%", 1000), parse_limit("1.5KiB", None)
        (500, 1536)
    """
    wrong = SettingsError(
        f"A limit of {limit!r} is not possible. Give bytes, a size such as '8GiB', or a share of memory such as '50%'."
    )
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise wrong
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|(?:([kmgt]i?)?b?))\s*", str(limit), re.ASCII | re.IGNORECASE)
    if found is None:
        raise wrong
    number, unit = float(found[1]), (found[2] or "").lower()
    if unit != "%":
        size = int(number * _UNITS[(found[3] or "").lower()])
    elif number > 100:
        raise wrong
    elif available is None:
        raise SettingsError(
            f"A limit of {limit!r} is a share of the memory that can be taken, which is not known on this machine. "
            "Give bytes, or a size such as '8GiB'."
        )
    else:
        size = int(number / 100 * available)
    if size < 1:
        raise wrong
    return size
