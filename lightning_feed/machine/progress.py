"""Progress bars for copying and packing."""

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(text: str, total: int, unit: str = "B") -> "tqdm[Any]":
    """Return a progress bar for a terminal; disabled if there is no standard error, as in some services."""
    disable = None  # then tqdm itself disables the bar if standard error is not a terminal
    if sys.stderr is None or getattr(sys.stderr, "closed", False):
        disable = True
    return tqdm(total=total, desc=text, unit=unit, unit_scale=unit == "B", leave=False, disable=disable)
