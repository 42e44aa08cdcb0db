"""X5: what reading, decoding and every transform cost, and the loader as if transforms were free."""

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_feed.errors import DatasetError, FeedError
from lightning_feed.load.cacheable import CacheableDataset
from lightning_feed.load.encoded_batch import EncodedImageDataset
from lightning_feed.load.image_dataset import ImageDataset
from lightning_feed.load.rounds import LoaderRate, RoundLimits
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import Changes
from lightning_feed.load.watched import Beat, watched
from lightning_feed.watch.experiments.results import NamedCost
from lightning_feed.watch.experiments.sample_files import innermost
from lightning_feed.watch.experiments.subject import Part, rate_of
from lightning_feed.watch.experiments.transform_sites import Site, Spent, StepTimer, find_sites, replaced, timed

_ENOUGH = 200
"""Samples."""
_OWN_SHARE = 0.05
"""Of a sample's CPU time, from which what a container does beside calling its steps is named."""


class Given:
    """Stands for a transform, and gives what that gave once, whatever it is called with.

    Args:
        made: what it gives. Dicts and lists as shallow copies.
    """

    def __init__(self, made: Any) -> None:
        self.made = made

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Give it."""
        return copy.copy(self.made) if isinstance(self.made, (Mapping, list)) else self.made


class GivenRecipe(Given):
    """The same for the recipe of an ImageDataset: it decodes the whole picture, since that is not its own work."""

    crops = False

    def __call__(self, picture: Any) -> Any:
        """Decode, and give it."""
        picture.whole()
        return super().__call__()


def measure_costs(
    part: Part, max_s: float, *, timer: StepTimer | None = None, samples: int = _ENOUGH
) -> tuple[NamedCost, ...]:
    """What the steps of a sample's way cost, in this process, with one thread where workers would have one.

    Each sample is made twice and timed the second time, so that its files are in the page cache. Data sets that tell
    reading from decoding (a :class:`CacheableDataset`, torchvision's folders) have both by name; of others, all that is
    no transform is ``load``.

    Args:
        part: a loader with a map-style or an iterable data set.
        max_s: how long at most.
        timer: keeps the times; its clocks count nanoseconds.
        samples: how many at most.

    Raises:
        DatasetError: when a sample cannot be made.
        LoaderError: when one takes longer than ``max_s``.
    """
    timer = timer or StepTimer()
    indices = [] if part.stream else part.first_samples(samples)
    with untouched(part.loader), threads_of_a_worker(part):
        sites = find_sites(part.loader.dataset)
        with replaced(sites, lambda site: timed(site.transform, timer)):
            work = _in_stream(part, timer, max_s, samples) if part.stream else _by_index(part, timer, max_s, indices)
            name = type(part.loader.dataset).__name__
            count = watched(
                work,
                silent_s=max_s,
                unblock=lambda: False,
                what=lambda seconds: (
                    f"A sample of the data set ({name}) took longer than {seconds:g} s. See where it "
                    "waits: for a lock, a connection, or a file system that does not answer."
                ),
            )
    least_ns = _OWN_SHARE * sum(step.cpu_ns for step in timer.steps)
    met = [step for step in timer.steps if step.wall_ns and (step.cpu_ns > least_ns or not step.container)]
    return tuple(
        NamedCost(name=step.name, cpu_ms=step.cpu_ns / count / 1e6, wall_ms=step.wall_ns / count / 1e6) for step in met
    )


def record_outputs(part: Part, sites: list[Site]) -> dict[int, Any]:
    """What each site's transform gave for one sample, by the id of the transform. Those that were not called are
    missing."""
    given: dict[int, Any] = {}

    def noting(site: Site) -> Any:
        transform = site.transform

        def call(*args: Any, **named: Any) -> Any:
            made = transform(*args, **named)
            given[id(transform)] = made
            return made

        call.crops = getattr(transform, "crops", False)  # type: ignore[attr-defined]  # what a recipe has
        return call

    with untouched(part.loader), replaced(sites, noting):
        dataset = part.loader.dataset
        if part.stream:
            next(iter(dataset), None)
        else:
            for index in part.first_samples(1):
                dataset[index]
    return given


def measure_without_transforms(parts: tuple[Part, ...], limits: RoundLimits) -> LoaderRate | None:
    """The rate of the loaders with every transform's result given instead of made; None where there is no transform.

    Reading, decoding, collating and handing over stay as they are, with the same shapes.
    """
    made: dict[int, Any] = {}
    sites: list[Site] = []
    for part in parts:
        found = find_sites(part.loader.dataset)
        made |= record_outputs(part, found)
        sites += [site for site in found if id(site.transform) in made]
    if not sites:
        return None

    def free(site: Site) -> Any:
        kind = GivenRecipe if isinstance(site.owner, ImageDataset) else Given
        return kind(made[id(site.transform)])

    with replaced(sites, free):
        return rate_of(parts, lambda part: Changes(endless=not part.stream), limits)[0]


def _by_index(part: Part, timer: StepTimer, max_s: float, indices: list[Any]) -> Callable[[Beat], int]:
    dataset: Any = part.loader.dataset
    base, _ = innermost(dataset, indices[0]) if indices else (dataset, None)
    way: Callable[..., None]
    if isinstance(base, EncodedImageDataset):
        way, stages = _whole, [timer.step("read")]
    elif isinstance(base, CacheableDataset):
        way, stages = _stages, [timer.step("read"), timer.step("decode")]
        # The recipe of an ImageDataset is all of its augment, and timed by its own name.
        stages.append(Spent("augment") if isinstance(base, ImageDataset) else timer.step("augment"))
    elif callable(getattr(base, "loader", None)) and hasattr(base, "samples"):
        way, stages = _folder, [timer.step("read"), timer.step("decode")]
    else:
        way, stages = _whole, [timer.step("load")]
    # Transforms were found before, and come after.
    timer.steps.sort(key=lambda step: not any(step is stage for stage in stages))

    def run(beat: Beat) -> int:
        began, done = time.monotonic(), 0
        for index in indices:
            for counts in (False, True):
                timer.on = counts
                try:
                    way(timer, stages, dataset, index)
                except FeedError:
                    raise
                except Exception as error:
                    raise DatasetError(
                        f"The data set ({type(dataset).__name__}) cannot give sample {index}: {type(error).__name__}: "
                        f"{error}. Mend it, or leave the sample out."
                    ) from error
                beat.beat()
            done += 1
            if beat.stopped or time.monotonic() - began > max_s:
                break
        return max(1, done)

    return run


def _in_stream(part: Part, timer: StepTimer, max_s: float, samples: int) -> Callable[[Beat], int]:
    dataset: Any = part.loader.dataset
    load = timer.step("load")
    timer.steps.sort(key=lambda step: step is not load)

    def run(beat: Beat) -> int:
        began, done = time.monotonic(), 0
        stream = iter(dataset)
        next(stream, None)  # opens what is to be opened
        beat.beat()
        while done < samples and time.monotonic() - began < max_s and not beat.stopped:
            timer.on = True
            timer.call(load, next, stream, None)
            beat.beat()
            done += 1
        return max(1, done)

    return run


def _whole(timer: StepTimer, stages: list[Spent], dataset: Any, index: Any) -> None:
    """A sample as it is made; what no step of a transform took is the stage's."""
    timer.call(stages[0], dataset.__getitem__, index)


def _folder(timer: StepTimer, stages: list[Spent], dataset: Any, index: Any) -> None:
    """torchvision's: ``loader(path)`` reads and decodes; what reading the file again takes is reading."""
    read, decode = stages
    base, inner = innermost(dataset, index)
    path = base.samples[inner][0]
    cpu, wall = read.cpu_ns, read.wall_ns
    timer.call(read, _read_file, path)
    timer.call(decode, dataset.__getitem__, index)
    decode.cpu_ns -= read.cpu_ns - cpu
    decode.wall_ns -= read.wall_ns - wall


def _stages(timer: StepTimer, stages: list[Spent], dataset: Any, index: Any) -> None:
    """Ours, by the public methods. What a cache holds is read and decoded all the same."""
    read, decode, augment = stages
    base, inner = innermost(dataset, index)
    data = timer.call(read, base.read, inner)
    decoded = timer.call(decode, base.decode, data, inner)
    if not getattr(getattr(decoded, "flags", None), "writeable", True):
        decoded = decoded.copy()
    timer.call(augment, base.augment, decoded, inner)


def _read_file(path: Any) -> int:
    return len(Path(os.fspath(path)).read_bytes())


@contextmanager
def threads_of_a_worker(part: Part) -> Iterator[None]:
    """Within it, torch has one thread where the loader has workers."""
    threads = torch.get_num_threads()
    try:
        if part.loader.num_workers:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
