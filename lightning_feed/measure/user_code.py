"""Distinguishes files of the user's program from library files."""

import os
import sysconfig
from pathlib import Path

import torch

_TORCH: tuple[str, ...] = (str(Path(torch.__file__).parent) + os.sep,)
_DEMO = str(Path(__file__).parents[1] / "demo.py")
_LIBRARIES = tuple(
    {
        # Not sys.prefix: the user's project may be inside it, such as /usr/src/app with a Python in /usr.
        *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]) + os.sep,  # and not lightning_feed_runs beside it
    }
)


def is_users(file: str) -> bool:
    """True for notebook cells, and for files outside Python, installed packages and this package.

    Also for the demo, which stands in for a user's program.
    """
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    if file == _DEMO:
        return True
    return not file.startswith((*_TORCH, *_LIBRARIES)) and "site-packages" not in file and "dist-packages" not in file


def is_torchs(file: str) -> bool:
    """True for a file of torch."""
    return file.startswith(_TORCH)
