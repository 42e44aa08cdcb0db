"""The cost of making a sample: reading, decoding and every transform by name, and the loader without transforms."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torchvision.transforms as v1
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_feed.diagnosing.disk import innermost
from lightning_feed.diagnosing.session import LoaderPart, Session, fresh, make_sample, naming, not_hanging
from lightning_feed.images.crop import UserTransform
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.load.cacheable import CacheableDataset
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import NamedCost
from lightning_feed.trials.cloning import Heartbeat

_NAMES = {
    *("transform", "transforms", "target_transform", "transform_fn", "tfm", "tfms", "preprocess", "preprocessing"),
    *("augment", "augmentation", "augmentations", "aug", "augs"),
}
_PACKAGES = ("torchvision.transforms", "torchaudio.transforms", "albumentations", "kornia", "monai.transforms")
_BY_CHANCE = ("RandomApply", "RandomChoice", "RandomOrder", "OneOf", "SomeOf", "OneOrOther")
"""Containers of which each call uses a part only: timed as one step."""
_DEEPEST = 6
_MOST_SAMPLES = 200


# --- where a data set keeps its transforms ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Site:
    """An attribute that holds a transform."""

    owner: Any
    attribute: str

    @property
    def transform(self) -> Any:
        """The transform."""
        return vars(self.owner)[self.attribute]


@contextmanager
def replaced(transforms: Mapping[Site, Any]) -> Iterator[None]:
    """Within it, each site holds another transform, which gets what the user's own gets; afterwards, what it held."""
    before = {site: site.transform for site in transforms}
    try:
        for site, made in transforms.items():
            was = site.transform
            if isinstance(was, UserTransform):
                made = UserTransform(made, kind="pil" if was.takes_pil else "tensor")
            vars(site.owner)[site.attribute] = made  # past whatever the owner does about attributes
        yield
    finally:
        for site, was in before.items():
            vars(site.owner)[site.attribute] = was


def find_sites(dataset: Any) -> list[Site]:
    """The transforms of a data set and of the data sets in it: subsets, concatenations, wrappers."""
    found = [Site(owner, name) for one in _data_sets_in(dataset) for owner, name in _attributes(one)]
    return list({(id(site.owner), site.attribute): site for site in found}.values())


def _data_sets_in(dataset: Any, depth: int = 0) -> Iterator[Any]:
    """A data set, and those that it holds in its attributes or in lists there."""
    yield dataset
    if depth >= _DEEPEST:
        return
    for value in list(getattr(dataset, "__dict__", {}).values()):
        for held in value[:100] if isinstance(value, (list, tuple)) else (value,):
            if isinstance(held, Dataset) and held is not dataset:
                yield from _data_sets_in(held, depth + 1)


def _attributes(dataset: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(dataset, ImageDataset):
        if not dataset.encoded:  # then it only draws by its recipe, and others apply it
            yield dataset, "recipe"
        return
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if value is None or isinstance(value, (type, Dataset)):
            continue
        if type(value).__name__ == "StandardTransform":  # torchvision's pair of the two that it is made of
            yield from ((value, inner) for inner in ("transform", "target_transform") if getattr(value, inner, None))
        elif callable(value) and (name.lstrip("_") in _NAMES or type(value).__module__.startswith(_PACKAGES)):
            yield dataset, name


def _users(site: Site) -> Any:
    """The user's own transform."""
    return site.transform.transform if isinstance(site.transform, UserTransform) else site.transform


def _is_recipe(site: Site) -> bool:
    """Whether it is a recipe of ours, which decodes the image."""
    return isinstance(site.owner, ImageDataset) and not isinstance(site.transform, UserTransform)


# --- transforms whose steps are timed ---------------------------------------------------------------------------------


@dataclass
class Spent:
    """The time that a step took so far, in nanoseconds, without the steps in it."""

    cpu_ns: int = 0
    wall_ns: int = 0


@dataclass
class StepTimer:
    """The times of all steps, in the order in which they were met.

    Attributes:
        on: whether calls count.
        cpu: CPU time of this process in ns.
        wall: time in ns.
    """

    on: bool = False
    cpu: Callable[[], int] = time.process_time_ns
    wall: Callable[[], int] = time.perf_counter_ns
    steps: dict[str, Spent] = field(default_factory=dict)
    _inner: Spent = field(default_factory=Spent)
    """Of the steps in the present one."""

    def step(self, name: str) -> str:
        """A new step, and its name; one that is taken gets a number."""
        same = sum(one == name or one.startswith(f"{name} (") for one in self.steps)
        name = f"{name} ({same + 1})" if same else name
        self.steps[name] = Spent()
        return name

    def call(self, step: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call, and add the time to the step, but for that of the steps in it."""
        if not self.on:
            return function(*args, **named)
        outer, self._inner = self._inner, Spent()
        cpu, wall = self.cpu(), self.wall()
        made = function(*args, **named)
        wall, cpu = self.wall() - wall, self.cpu() - cpu
        self.steps[step].wall_ns += wall - self._inner.wall_ns
        self.steps[step].cpu_ns += cpu - self._inner.cpu_ns
        self._inner = Spent(outer.cpu_ns + cpu, outer.wall_ns + wall)
        return made


class _Timed:
    """Stands for a step and times it. It has the step's attributes, and passes ``isinstance`` as the step does."""

    def __init__(self, step: Any, name: str, timer: StepTimer) -> None:
        self._step, self._name, self._timer = step, name, timer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._step)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._timer.call(self._name, self._step, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._step, name)


def timed(transform: Any, timer: StepTimer) -> Any:
    """A copy of a transform that times its steps; the transform itself is not written to.

    ``Compose`` and its like are entered: what has a list ``transforms`` of other steps, as of torchvision,
    albumentations and MONAI, and ``nn.Sequential``. Steps are called as the container calls them, with positional
    arguments or keywords. What a container does beside calling them belongs to what calls it.
    """
    steps = getattr(transform, "transforms", None)
    inside: dict[str, Any] = {}
    if isinstance(transform, nn.Sequential):
        inside["_modules"] = {name: timed(step, timer) for name, step in transform._modules.items()}
    elif isinstance(steps, (list, tuple)) and _calls(transform, steps):
        inside["transforms"] = type(steps)(timed(step, timer) for step in steps)
    if not inside:  # a step, which may be a thing that cannot be copied
        return _Timed(transform, timer.step(name_of(transform)), timer)
    twin = copy.copy(transform)
    vars(twin).update(inside)
    return twin


def _calls(transform: Any, steps: Sequence[Any]) -> bool:
    """Whether the container calls these steps one after the other; not so the functions that a single step is made of,
    as albumentations' ColorJitter."""
    if not steps or type(transform).__name__ in _BY_CHANCE or not all(map(callable, steps)):
        return False
    named = any("Compose" in kind.__name__ for kind in type(transform).__mro__)
    return named or not all(isinstance(step, (FunctionType, BuiltinFunctionType)) for step in steps)


def name_of(step: Any) -> str:
    """The name of a step for users: its class, or the function's name."""
    function = getattr(step, "__func__", step)
    name = getattr(function, "__name__", None) or type(step).__name__
    return str(name).replace("<lambda>", "lambda")


# --- costs by name ----------------------------------------------------------------------------------------------------


def measure_costs(session: Session) -> None:
    """The costs of all loaders' samples, by name."""
    share_s = session.share_s / len(session.parts)
    costs = [(part.name, cost) for part in session.parts for cost in sample_costs(part, share_s)]
    session.note(costs=tuple(replace(cost, name=f"{of}: {cost.name}" if of else cost.name) for of, cost in costs))


def sample_costs(
    part: LoaderPart, max_s: float, *, timer: StepTimer | None = None, samples: int = _MOST_SAMPLES
) -> tuple[NamedCost, ...]:
    """The cost of each step that makes a sample, in this process, with one thread where workers would have one.

    Each sample is made twice and timed the second time, so that its files are in the page cache; of an iterable data
    set every second one is timed. Data sets that tell reading from decoding (a :class:`CacheableDataset`, torchvision's
    folders) have both by name; of others, all that is no transform is ``load``.

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
    dataset: Any = part.loader.dataset
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

        with replaced({site: timed(_users(site), timer) for site in find_sites(dataset)}):
            count = not_hanging(work, max_s, f"A sample of the data set ({part.data_kind})")
    per_ms = 1e6 * max(1, count)
    return tuple(
        NamedCost(name=name, cpu_ms=step.cpu_ns / per_ms, wall_ms=step.wall_ns / per_ms)
        for name, step in timer.steps.items()
        if step.wall_ns
    )


_END = object()
"""Given by a stream that has come to its end."""


def _maker(part: LoaderPart, indices: Iterable[Any], timer: StepTimer) -> Callable[[Any], Any]:
    """A function that makes the sample of an index, and times its stages."""
    dataset: Any = part.loader.dataset
    if part.stream:
        stream, load = iter(dataset), timer.step("load")
        return lambda _: timer.call(load, next, stream, _END)
    base = next((innermost(dataset, index)[0] for index in indices), dataset)
    encoded = isinstance(base, ImageDataset) and base.encoded
    make: Callable[[StepTimer, Any, Any], None] | None = None
    if isinstance(base, CacheableDataset) and not encoded:
        make = _make_in_steps
    elif callable(getattr(base, "loader", None)) and hasattr(base, "samples"):
        make = _make_of_folder
    if make is None:  # what no step of a transform takes belongs to the whole
        return partial(timer.call, timer.step("read" if encoded else "load"), dataset.__getitem__)
    for stage in ("read", "decode") if make is _make_of_folder else ("read", "decode", "augment"):
        timer.step(stage)
    return partial(make, timer, dataset)


def _make_of_folder(timer: StepTimer, dataset: Any, index: Any) -> None:
    """torchvision's: ``loader(path)`` reads and decodes; what reading the file again takes is reading."""
    base, inner = innermost(dataset, index)
    read, decode = timer.steps["read"], timer.steps["decode"]
    before = replace(read)
    timer.call("read", Path(base.samples[inner][0]).read_bytes)
    timer.call("decode", dataset.__getitem__, index)
    decode.cpu_ns -= read.cpu_ns - before.cpu_ns
    decode.wall_ns -= read.wall_ns - before.wall_ns


def _make_in_steps(timer: StepTimer, dataset: Any, index: Any) -> None:
    """Ours, by the public methods. What a cache holds is read and decoded all the same."""
    base, inner = innermost(dataset, index)
    decoded = timer.call("decode", base.decode, timer.call("read", base.read, inner), inner)
    if not getattr(getattr(decoded, "flags", None), "writeable", True):
        decoded = decoded.copy()
    if isinstance(base, ImageDataset):  # its recipe is all of it, and timed by its own name
        base.augment(decoded, inner)
    else:
        timer.call("augment", base.augment, decoded, inner)


@contextmanager
def threads_of_a_worker(part: LoaderPart) -> Iterator[None]:
    """Within it, torch has one thread where the loader has workers."""
    threads = torch.get_num_threads()
    try:
        if part.loader.num_workers:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


# --- the loader with less work in its transforms ----------------------------------------------------------------------


class Constant:
    """Stands for a transform, and gives what that gave once, whatever it is called with.

    Args:
        made: what it gives.
        decodes: whether it stands for the recipe of an ImageDataset: then it decodes the whole image, since that is
            not its own work.
    """

    crops = False

    def __init__(self, made: Any, *, decodes: bool = False) -> None:
        self.made = made
        self.decodes = decodes

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Give it."""
        if self.decodes:
            args[0].whole()
        return fresh(self.made)


class _Noting:
    """Calls a transform, and keeps what it last got and gave."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.crops = getattr(transform, "crops", False)  # what a recipe has
        self.args: tuple[Any, ...] = ()
        self.made: Any = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.made = self.transform(*args, **named)
        self.args = (*args, *named.values())
        return self.made


def _rate_with(session: Session, other: Callable[[Site, _Noting], Any]) -> float | None:
    """The rate of the loaders with other transforms in the place of theirs; None where there are none to replace.

    Args:
        session: with the loaders.
        other: gives the transform for a site, by what the user's own got and gave of one sample; None: none.
    """
    session.check_memory()
    others: dict[Site, Any] = {}
    for part in session.parts:
        noting = {site: _Noting(_users(site)) for site in find_sites(part.loader.dataset)}
        with preserve_state(part.loader):
            with replaced(noting):
                make_sample(part)
            made = {site: other(site, note) for site, note in noting.items() if note.args}
        others |= {site: one for site, one in made.items() if one is not None}
    if not others:
        return None
    with replaced(others):
        return session.rate()


def measure_without_transforms(session: Session) -> None:
    """The rate of the loaders with every transform's result given instead of made.

    Reading, decoding, collating and handing over stay as they are, with the same shapes. Nothing is noted where there
    is no transform.
    """
    rate = _rate_with(session, lambda site, note: Constant(note.made, decodes=_is_recipe(site)))
    session.note(no_transform_per_s=rate)


class UntilSized:
    """The first steps of a pipeline, and what they give as a uint8 tensor of shape (C, H, W).

    Args:
        steps: called one after the other, each with what the one before gave.
    """

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Tensor:
        """Apply them."""
        for step in self.steps:
            image = step(image)
        if isinstance(image, Tensor):
            return image if image.dtype == torch.uint8 else (image * 255).to(torch.uint8)
        made: Tensor = v2.functional.pil_to_tensor(image)
        return made


def measure_as_uint8(session: Session) -> None:
    """The rate of the loaders with the pixel work left to the device: images at their final size, as uint8.

    Of a pipeline of transforms (torchvision's ``Compose`` of either version, ``nn.Sequential``), those up to the last
    one that changes the image's size stay in the workers, since a batch needs one size. What comes after them (flips,
    colours, blurs, conversions to floats, normalising) can be done for the whole batch in ``device_transform``, and is
    left out here. Nothing is noted where no pipeline of images is found.
    """
    session.note(as_uint8_per_s=_rate_with(session, _until_sized))


def _until_sized(site: Site, note: _Noting) -> UntilSized | None:
    """The steps that would stay in the workers; None for what is not about images, or gives uint8 already.

    Images with boxes or masks are left alone: the device would have to do the same to those.
    """
    pipeline, steps = _users(site), list[Any]()
    if isinstance(pipeline, nn.Sequential) or type(pipeline) in (v1.Compose, v2.Compose):
        steps = list(pipeline if isinstance(pipeline, nn.Sequential) else pipeline.transforms)
    is_uint8 = isinstance(note.made, Tensor) and note.made.dtype == torch.uint8
    if not steps or len(note.args) != 1 or is_uint8 or _size_of(note.made) is None:
        return None
    (image,) = note.args
    size, last = _size_of(image), 0
    for number, step in enumerate(steps, start=1):
        image = step(image)
        before, size = size, _size_of(image)
        if size != before:
            last = number
    return UntilSized(steps[:last])


def _size_of(image: Any) -> list[int] | None:
    """[height, width]; None for what is no image."""
    if isinstance(image, Image.Image) or (isinstance(image, Tensor) and image.ndim == 3):
        size: list[int] = v2.functional.get_size(image)
        return size
    return None
