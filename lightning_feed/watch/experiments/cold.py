"""X6: the loader with none of its files in the page cache."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_feed.load.rounds import LoaderRate, RoundLimits
from lightning_feed.load.variant import Changes
from lightning_feed.watch.experiments.disk import file_system
from lightning_feed.watch.experiments.subject import Part, rate_of
from lightning_feed.watch.experiments.subset import Subset


def why_not_cold(files: Sequence[str], root: Path = Path("/")) -> str | None:
    """Why these files cannot be read cold; None when they can."""
    if not hasattr(os, "posix_fadvise"):
        return "this system has no posix_fadvise, by which files are taken out of the page cache"
    if not files:
        return "no file was seen to be opened by the samples: they lie in memory, or a library opens them in C"
    system, kind = file_system(files[0], root)
    if kind == "memory":
        return f"the files lie in memory ({system})"
    return None


def forget_files(files: Sequence[str]) -> int:
    """Take files out of the page cache, as far as no process maps them; returns how many were asked for.

    Needs no rights but to read them (posix_fadvise(2), POSIX_FADV_DONTNEED).
    """
    done = 0
    for path in files:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # gone since: it cannot be read at all, and the loader will say so
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            done += 1
        finally:
            os.close(file)
    return done


def measure_cold(
    parts: tuple[Part, ...],
    subset: Subset,
    limits: RoundLimits,
    *,
    forget: Callable[[Sequence[str]], object] = forget_files,
) -> LoaderRate:
    """The rate over the subset, whose files are forgotten before each time through.

    Args:
        parts: the loaders.
        subset: batches, and the files that they are made of.
        limits: how long.
        forget: takes files out of the page cache.
    """
    return rate_of(
        parts,
        lambda part: Changes(batches=subset.batches[part]),
        limits,
        prepare=lambda: forget(subset.files),
    )[0]
