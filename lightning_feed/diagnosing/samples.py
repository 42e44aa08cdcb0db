"""The cost of making a sample, divided into reading, decoding and each transform."""

import copy
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_feed.diagnosing.parts import LoaderPart, naming, not_hanging, threads_of_a_worker
from lightning_feed.diagnosing.session import Session
from lightning_feed.images.crop import UserTransform
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.load.kinds import AnyDataset, Index
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import NamedCost
from lightning_feed.trials.loader_rate import Heartbeat

_NAMES = {
    *("transform", "transforms", "target_transform", "transform_fn", "tfm", "tfms", "preprocess", "preprocessing"),
    *("augment", "augmentation", "augmentations", "aug", "augs"),
}
_PACKAGES = ("torchvision.transforms", "torchaudio.transforms", "albumentations", "kornia", "monai.transforms")
_BY_CHANCE = ("RandomApply", "RandomChoice", "RandomOrder", "OneOf", "SomeOf", "OneOrOther")
"""Containers that use only some of their steps in each call. They are timed as one step."""
_DEEPEST = 6
MOST_SAMPLES = 200
"""Largest number of samples that are timed."""


# --- where a dataset keeps its transforms -----------------------------------------------------------------------------


def innermost(dataset: AnyDataset, index: Index) -> tuple[AnyDataset, Index]:
    """Return the dataset inside Subsets and ConcatDatasets, and the sample's index in that dataset."""
    while True:
        if isinstance(dataset, Subset):
            index = dataset.indices[index]
            dataset = dataset.dataset
        elif isinstance(dataset, ConcatDataset):
            if index < 0:
                index += len(dataset)
            part = bisect_right(dataset.cumulative_sizes, index)
            if part:
                index -= dataset.cumulative_sizes[part - 1]
            dataset = dataset.datasets[part]
        else:
            return dataset, index


@dataclass(frozen=True, eq=False)
class Site:
    """An attribute that holds a transform."""

    owner: Any
    attribute: str

    @property
    def held(self) -> Any:
        """The transform in the owner's attribute, which may be inside a wrapper of ours."""
        return vars(self.owner)[self.attribute]

    @property
    def transform(self) -> Any:
        """The user's own transform."""
        if isinstance(self.held, UserTransform):
            return self.held.transform
        return self.held


@contextmanager
def replaced(transforms: Mapping[Site, Any]) -> Iterator[None]:
    """Context manager to replace transforms, given by the attributes that hold them.

    A new transform is called with the arguments that the dataset passes to the old one.
    """
    originals = {site: site.held for site in transforms}
    try:
        for site, transform in transforms.items():
            original = originals[site]
            if isinstance(original, UserTransform):
                transform = UserTransform(transform, kind="pil" if original.takes_pil else "tensor")
            vars(site.owner)[site.attribute] = transform  # bypasses the owner's own __setattr__
        yield
    finally:
        for site, original in originals.items():
            vars(site.owner)[site.attribute] = original


def find_sites(dataset: object) -> list[Site]:
    """Return the transforms of a dataset and of the datasets inside it: subsets, concatenations, wrappers."""
    sites = [site for inner in _datasets_in(dataset) for site in _sites_of(inner)]
    return list({(id(site.owner), site.attribute): site for site in sites}.values())


def _datasets_in(dataset: object, depth: int = 0) -> Iterator[Any]:
    """Yield a dataset and all datasets inside it: in its attributes, or in lists or tuples that are attributes."""
    yield dataset
    if depth == _DEEPEST:
        return
    for value in list(getattr(dataset, "__dict__", {}).values()):
        for held in value[:100] if isinstance(value, (list, tuple)) else (value,):
            if isinstance(held, Dataset) and held is not dataset:
                yield from _datasets_in(held, depth + 1)


def _sites_of(dataset: object) -> list[Site]:
    """Return the transforms in the attributes of a dataset, without those of the datasets inside it."""
    if isinstance(dataset, ImageDataset):
        # A dataset of encoded images only draws the recipe's random numbers. The recipe is applied elsewhere.
        if dataset.encoded:
            return []
        return [Site(dataset, "recipe")]
    sites = []
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if type(value).__name__ == "StandardTransform":  # torchvision's pair of transform and target_transform
            sites += [Site(value, pair) for pair in ("transform", "target_transform") if getattr(value, pair, None)]
        elif _is_transform(name, value):
            sites.append(Site(dataset, name))
    return sites


def _is_transform(name: str, value: object) -> bool:
    if not callable(value) or isinstance(value, (type, Dataset)):
        return False
    return name.lstrip("_") in _NAMES or type(value).__module__.startswith(_PACKAGES)


# --- transforms whose steps are timed ---------------------------------------------------------------------------------


@dataclass
class Spent:
    """Nanoseconds that a step has taken so far, without the steps inside it."""

    cpu_ns: int = 0
    wall_ns: int = 0


@dataclass
class StepTimer:
    """The times of all steps, in the order of their first call.

    Attributes:
        on: True while calls count.
        cpu: clock of this process's CPU time, in nanoseconds.
        wall: clock, in nanoseconds.
    """

    on: bool = False
    cpu: Callable[[], int] = time.process_time_ns
    wall: Callable[[], int] = time.perf_counter_ns
    steps: dict[str, Spent] = field(default_factory=dict)
    _inner: Spent = field(default_factory=Spent)
    """Time of the steps inside the step that is being called."""

    def step(self, name: str) -> str:
        """Add a step, and return its name, with a number if the name is taken."""
        same = sum(step == name or step.startswith(f"{name} (") for step in self.steps)
        if same:
            name = f"{name} ({same + 1})"
        self.steps[name] = Spent()
        return name

    def call(self, step: str, function: Callable[..., Any], *args: object, **named: Any) -> Any:
        """Call the function, and add its time to the step, without the time of the steps inside the call."""
        if not self.on:
            return function(*args, **named)
        outer = self._inner
        self._inner = Spent()
        cpu_began_ns = self.cpu()
        wall_began_ns = self.wall()
        result = function(*args, **named)
        wall_ns = self.wall() - wall_began_ns
        cpu_ns = self.cpu() - cpu_began_ns
        self.steps[step].wall_ns += wall_ns - self._inner.wall_ns
        self.steps[step].cpu_ns += cpu_ns - self._inner.cpu_ns
        self._inner = Spent(outer.cpu_ns + cpu_ns, outer.wall_ns + wall_ns)
        return result


class _Timed:
    """Proxy that times a step. The proxy has the step's attributes, and the step's class for ``isinstance``."""

    def __init__(self, step: Any, name: str, timer: StepTimer) -> None:
        self._step = step
        self._name = name
        self._timer = timer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._step)

    def __call__(self, *args: object, **named: Any) -> Any:
        return self._timer.call(self._name, self._step, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._step, name)


def timed(transform: Any, timer: StepTimer) -> Any:
    """Return a copy of a transform that times its steps. The transform itself is not changed.

    Steps inside ``nn.Sequential`` and containers like ``Compose``, with a list ``transforms`` (torchvision,
    albumentations, MONAI), are timed one by one. A container's own time counts for its caller.
    """
    steps = getattr(transform, "transforms", None)
    if isinstance(transform, nn.Sequential):
        copied = copy.copy(transform)
        vars(copied)["_modules"] = {name: timed(step, timer) for name, step in transform._modules.items()}
    elif isinstance(steps, (list, tuple)) and _calls(transform, steps):
        copied = copy.copy(transform)
        vars(copied)["transforms"] = type(steps)(timed(step, timer) for step in steps)
    else:  # a step, which it may be impossible to copy
        return _Timed(transform, timer.step(name_of(transform)), timer)
    return copied


def _calls(transform: object, steps: Sequence[Any]) -> bool:
    """Return True for a container that calls these steps one after the other.

    False if the list holds parts of a single step, as in albumentations' ColorJitter.
    """
    if not steps or type(transform).__name__ in _BY_CHANCE or not all(map(callable, steps)):
        return False
    named = any("Compose" in kind.__name__ for kind in type(transform).__mro__)
    return named or not all(isinstance(step, (FunctionType, BuiltinFunctionType)) for step in steps)


def name_of(step: object) -> str:
    """Return the name of a step in reports: the name of its class or function."""
    name = getattr(step, "__name__", None) or type(step).__name__
    return str(name).replace("<lambda>", "lambda")


# --- costs by name ----------------------------------------------------------------------------------------------------


def measure_costs(session: Session) -> None:
    """Measure the costs of all loaders' samples, by name."""
    costs: list[NamedCost] = []
    for part in session.parts:
        for cost in sample_costs(part, session.share_s / len(session.parts)):
            name = f"{part.name}: {cost.name}" if part.name else cost.name
            costs.append(replace(cost, name=name))
    session.note(costs=tuple(costs))


def sample_costs(
    part: LoaderPart, max_s: float, *, timer: StepTimer | None = None, samples: int = MOST_SAMPLES
) -> tuple[NamedCost, ...]:
    """Return the cost of each step of making a sample in this process, with as many threads as a worker would have.

    Each sample is made twice and timed the second time, so that its files are in the page cache. For an iterable
    dataset, every second sample is timed. Reading and decoding are separate costs if the dataset separates them (an
    ImageDataset, torchvision's folders); else everything except transforms is ``load``.

    Args:
        part: a loader with a map-style or an iterable dataset.
        max_s: longest time in seconds.
        timer: measures and keeps the times, with clocks in nanoseconds; None for a new StepTimer.
        samples: largest number of samples.

    Raises:
        DatasetError: a sample cannot be made.
        LoaderError: a sample takes longer than ``max_s``.
    """
    timer = timer or StepTimer()
    dataset: AnyDataset = part.loader.dataset
    indices = range(samples) if part.stream else part.first_samples(samples)
    with preserve_state(part.loader), threads_of_a_worker(part):
        make = _maker(part, indices, timer)

        def work(beat: Heartbeat) -> int:
            began = time.monotonic()
            for done, index in enumerate(indices):
                for counts in (False, True):
                    timer.on = counts
                    with naming(dataset, index):
                        if make(index) is _END:
                            return done
                    beat.beat()
                if beat.stopped or time.monotonic() - began > max_s:
                    return done + 1
            return len(indices)

        with replaced({site: timed(site.transform, timer) for site in find_sites(dataset)}):
            count = not_hanging(work, max_s, f"A sample of the dataset ({type(dataset).__name__})")
    per_ms = 1e6 * max(1, count)
    return tuple(
        NamedCost(name=name, cpu_ms=step.cpu_ns / per_ms, wall_ms=step.wall_ns / per_ms)
        for name, step in timer.steps.items()
        if step.wall_ns
    )


_END = object()
"""Result at the end of a stream."""


def _maker(part: LoaderPart, indices: Iterable[Any], timer: StepTimer) -> Callable[[Any], Any]:
    """Return a function that makes the sample of an index, and times the stages of making it."""
    dataset: AnyDataset = part.loader.dataset
    if part.stream:
        stream = iter(dataset)
        load = timer.step("load")
        return lambda _: timer.call(load, next, stream, _END)
    base = next((innermost(dataset, index)[0] for index in indices), dataset)
    if isinstance(base, ImageDataset) and base.encoded:
        return partial(timer.call, timer.step("read"), dataset.__getitem__)
    make = None
    if isinstance(base, ImageDataset):
        make = _make_in_steps
    elif callable(getattr(base, "loader", None)) and hasattr(base, "samples"):
        make = _make_of_folder
    if make is None:  # the steps of transforms are timed one by one, and all the rest together
        return partial(timer.call, timer.step("load"), dataset.__getitem__)
    timer.step("read")
    timer.step("decode")
    return partial(make, timer, dataset)


def _make_of_folder(timer: StepTimer, dataset: AnyDataset, index: object) -> None:
    """Make a sample of torchvision's folder, whose ``loader(path)`` reads and decodes. Reads the file once more first.

    The time of that reading counts as reading, and is subtracted from the time of the rest.
    """
    base, inner = innermost(dataset, index)
    read = timer.steps["read"]
    decode = timer.steps["decode"]
    before = replace(read)
    timer.call("read", Path(base.samples[inner][0]).read_bytes)
    timer.call("decode", dataset.__getitem__, index)
    decode.cpu_ns -= read.cpu_ns - before.cpu_ns
    decode.wall_ns -= read.wall_ns - before.wall_ns


def _make_in_steps(timer: StepTimer, dataset: object, index: object) -> None:
    """Make a sample of an ImageDataset. Its recipe is the whole transform, and is timed under its own name."""
    base, inner = innermost(dataset, index)
    decoded = timer.call("decode", base.decode, timer.call("read", base.read, inner), inner)
    if not decoded.flags.writeable:
        decoded = decoded.copy()
    base.augment(decoded, inner)
