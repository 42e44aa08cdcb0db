"""The first batches of a loader, and the files that they are made of: what is read warm, and read cold."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_feed.errors import DatasetError
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import burst_of
from lightning_feed.watch.experiments.sample_files import listed_file, opened_by, sizes_of
from lightning_feed.watch.experiments.subject import Part

ROUNDS = 8
"""Of a subset: two that do not count, and six that do."""


@dataclass(frozen=True)
class Subset:
    """Some batches of each loader."""

    batches: dict[Part, list[Any]]
    files: tuple[str, ...]
    """That their samples are made of; empty where none was found."""
    bytes: int
    """Of the files."""


def choose(
    parts: tuple[Part, ...],
    *,
    batches_per_s: float,
    max_s: float,
    max_bytes: int | None,
    clock: Callable[[], float] = time.monotonic,
) -> Subset | str:
    """The first batches that the samplers give, as many as can be gone through in time and fit in memory; or why there
    are none.

    Args:
        parts: the loaders.
        batches_per_s: what they give.
        max_s: in which the subset must be gone through, and its files be found.
        max_bytes: that its files may have.
        clock: seconds.
    """
    if any(part.stream for part in parts):
        return "an iterable data set decides itself which samples come"
    burst = max(burst_of(part.loader) for part in parts)
    wanted = 1 + ROUNDS * burst
    count = min(wanted, int(batches_per_s * max_s))
    if count < 1 + burst:
        return f"a round of {burst} batches takes longer than the {max_s:.1f} s that there are for it"
    batches = {part: part.first_batches(count) for part in parts}
    deadline = clock() + max_s
    files: dict[str, int] = {}
    taken = 0
    for number in range(min(map(len, batches.values()))):
        new: dict[str, int] = {}
        for part, given in batches.items():
            new |= _files(part, given[number])
        added = sum(size for path, size in new.items() if path not in files)
        if max_bytes is not None and sum(files.values()) + added > max_bytes:
            break
        files |= new
        taken += 1
        if clock() > deadline:
            break
    if taken < 1 + burst:
        return f"only {taken} batches could be looked through in time and memory, and a round has {burst}"
    return Subset({part: given[:taken] for part, given in batches.items()}, tuple(files), sum(files.values()))


def files_of_samples(part: Part, indices: list[Any]) -> list[str]:
    """The files that these samples are made of: by the data set's list of them, or by making the samples in this
    process and listening to what is opened.

    Raises:
        DatasetError: when a sample cannot be made.
    """
    dataset: Any = part.loader.dataset
    found: list[str] = []
    with untouched(part.loader):
        for index in indices:
            path = listed_file(dataset, index)
            if path is not None:
                found.append(path)
                continue
            try:
                found += opened_by(lambda index=index: dataset[index])  # type: ignore[misc]  # bound in the loop
            except Exception as error:
                raise DatasetError(
                    f"The data set ({type(dataset).__name__}) cannot give sample {index}: {type(error).__name__}: "
                    f"{error}. Mend it, or leave the sample out."
                ) from error
    return found


def _files(part: Part, batch: Any) -> dict[str, int]:
    indices = [batch] if part.loader.batch_sampler is None else list(batch)
    return sizes_of(files_of_samples(part, indices))
