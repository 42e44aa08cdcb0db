"""The cost of making samples: of reading, decoding, each transform and each of the user's functions; rates without."""

import copy
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any, Literal

import numpy as np
import torch
import torchvision.transforms as v1
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_feed.data.image_backends import choose_decoder
from lightning_feed.diagnosing.disk import innermost
from lightning_feed.diagnosing.session import LoaderPart, Session, fresh, make_sample, naming, not_hanging
from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.images.crop import UserTransform
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.load.cacheable import CacheableDataset
from lightning_feed.load.kinds import AnyDataset, Batch, Sample
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import CropTrial, FunctionCost, NamedCost
from lightning_feed.measure.facts import with_loaders
from lightning_feed.measure.measurements import LoopFacts
from lightning_feed.measure.user_code import is_users
from lightning_feed.trials.cloning import Heartbeat

_NAMES = {
    *("transform", "transforms", "target_transform", "transform_fn", "tfm", "tfms", "preprocess", "preprocessing"),
    *("augment", "augmentation", "augmentations", "aug", "augs"),
}
_PACKAGES = ("torchvision.transforms", "torchaudio.transforms", "albumentations", "kornia", "monai.transforms")
_BY_CHANCE = ("RandomApply", "RandomChoice", "RandomOrder", "OneOf", "SomeOf", "OneOrOther")
"""Containers that use only some of their steps in each call: timed as one step."""
_DEEPEST = 6
_MOST_SAMPLES = 200


# --- where a data set keeps its transforms ----------------------------------------------------------------------------


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
        return self.held.transform if isinstance(self.held, UserTransform) else self.held


@contextmanager
def replaced(transforms: Mapping[Site, Any]) -> Iterator[None]:
    """Context manager to replace the transform at each site. The new one gets the same arguments."""
    before = {site: site.held for site in transforms}
    try:
        for site, made in transforms.items():
            was = before[site]
            if isinstance(was, UserTransform):
                made = UserTransform(made, kind="pil" if was.takes_pil else "tensor")
            vars(site.owner)[site.attribute] = made  # bypasses the owner's own __setattr__
        yield
    finally:
        for site, was in before.items():
            vars(site.owner)[site.attribute] = was


def find_sites(dataset: object) -> list[Site]:
    """The transforms of a data set and of the data sets inside it: subsets, concatenations, wrappers."""
    found = [Site(owner, name) for one in _data_sets_in(dataset) for owner, name in _attributes(one)]
    return list({(id(site.owner), site.attribute): site for site in found}.values())


def _data_sets_in(dataset: object, depth: int = 0) -> Iterator[Any]:
    """A data set, and the data sets in its attributes, or in lists there."""
    yield dataset
    values = list(vars(dataset).values()) if depth < _DEEPEST and hasattr(dataset, "__dict__") else []
    for value in values:
        for held in value[:100] if isinstance(value, (list, tuple)) else (value,):
            if isinstance(held, Dataset) and held is not dataset:
                yield from _data_sets_in(held, depth + 1)


def _attributes(dataset: object) -> Iterator[tuple[Any, str]]:
    if isinstance(dataset, ImageDataset):
        if not dataset.encoded:  # else it only draws the recipe's numbers, and the recipe is applied elsewhere
            yield dataset, "recipe"
        return
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if type(value).__name__ == "StandardTransform":  # torchvision's pair of transform and target_transform
            yield from ((value, inner) for inner in ("transform", "target_transform") if getattr(value, inner, None))
            continue
        is_transform = name.lstrip("_") in _NAMES or type(value).__module__.startswith(_PACKAGES)
        if is_transform and callable(value) and not isinstance(value, (type, Dataset)):
            yield dataset, name


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
    """Time of the steps inside the present one."""

    def step(self, name: str) -> str:
        """Add a step, and return its name, with a number if the name is taken."""
        same = sum(one == name or one.startswith(f"{name} (") for one in self.steps)
        name = f"{name} ({same + 1})" if same else name
        self.steps[name] = Spent()
        return name

    def call(self, step: str, function: Callable[..., Any], *args: object, **named: Any) -> Any:
        """Call the function, and add its time to the step, without that of the steps inside it."""
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
    """Proxy that times a step. It has the step's attributes, and looks like the step to ``isinstance``."""

    def __init__(self, step: Any, name: str, timer: StepTimer) -> None:
        self._step, self._name, self._timer = step, name, timer

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
    """A copy of a transform that times its steps. The transform itself is not changed.

    Steps inside ``nn.Sequential`` and containers like ``Compose``, with a list ``transforms`` (torchvision,
    albumentations, MONAI), are timed one by one. A container's own time counts as its caller's.
    """
    steps = getattr(transform, "transforms", None)
    if isinstance(transform, nn.Sequential):
        twin = copy.copy(transform)
        vars(twin)["_modules"] = {name: timed(step, timer) for name, step in transform._modules.items()}
    elif isinstance(steps, (list, tuple)) and _calls(transform, steps):
        twin = copy.copy(transform)
        vars(twin)["transforms"] = type(steps)(timed(step, timer) for step in steps)
    else:  # a step, which it may be impossible to copy
        return _Timed(transform, timer.step(name_of(transform)), timer)
    return twin


def _calls(transform: object, steps: Sequence[Any]) -> bool:
    """True for a container that calls these steps one after the other.

    False if they are parts of a single step, as in albumentations' ColorJitter.
    """
    if not steps or type(transform).__name__ in _BY_CHANCE or not all(map(callable, steps)):
        return False
    named = any("Compose" in kind.__name__ for kind in type(transform).__mro__)
    return named or not all(isinstance(step, (FunctionType, BuiltinFunctionType)) for step in steps)


def name_of(step: object) -> str:
    """The user-facing name of a step: its class or function name."""
    name = getattr(step, "__name__", None) or type(step).__name__
    return str(name).replace("<lambda>", "lambda")


# --- costs by name ----------------------------------------------------------------------------------------------------


def measure_costs(session: Session) -> None:
    """Measure the costs of all loaders' samples, by name."""
    share_s = session.share_s / len(session.parts)
    costs = [(part.name, cost) for part in session.parts for cost in sample_costs(part, share_s)]
    session.note(costs=tuple(replace(cost, name=f"{of}: {cost.name}" if of else cost.name) for of, cost in costs))


def sample_costs(
    part: LoaderPart, max_s: float, *, timer: StepTimer | None = None, samples: int = _MOST_SAMPLES
) -> tuple[NamedCost, ...]:
    """The cost of each step of making a sample in this process, with as many threads as a worker would have.

    Each sample is made twice and timed the second time, so that its files are in the page cache. For an iterable data
    set, every second sample is timed. Reading and decoding are separate costs if the data set separates them (a
    :class:`CacheableDataset`, torchvision's folders); else everything except transforms is ``load``.

    Args:
        part: a loader with a map-style or an iterable data set.
        max_s: longest time in seconds.
        timer: keeps the times; its clocks count nanoseconds.
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
            count = not_hanging(work, max_s, f"A sample of the data set ({type(dataset).__name__})")
    per_ms = 1e6 * max(1, count)
    return tuple(
        NamedCost(name=name, cpu_ms=step.cpu_ns / per_ms, wall_ms=step.wall_ns / per_ms)
        for name, step in timer.steps.items()
        if step.wall_ns
    )


_END = object()
"""Result at the end of a stream."""


def _maker(part: LoaderPart, indices: Iterable[Any], timer: StepTimer) -> Callable[[Any], Any]:
    """A function that makes the sample of an index, and times its stages."""
    dataset: AnyDataset = part.loader.dataset
    if part.stream:
        stream, load = iter(dataset), timer.step("load")
        return lambda _: timer.call(load, next, stream, _END)
    base = next((innermost(dataset, index)[0] for index in indices), dataset)
    if isinstance(base, ImageDataset) and base.encoded:
        return partial(timer.call, timer.step("read"), dataset.__getitem__)
    in_steps = isinstance(base, CacheableDataset)
    if not in_steps and not (callable(getattr(base, "loader", None)) and hasattr(base, "samples")):
        # The steps of transforms are timed one by one, and all the rest together.
        return partial(timer.call, timer.step("load"), dataset.__getitem__)
    make = _make_in_steps if in_steps else _make_of_folder
    for stage in _STAGES[make]:
        timer.step(stage)
    return partial(make, timer, dataset)


def _make_of_folder(timer: StepTimer, dataset: AnyDataset, index: object) -> None:
    """Make a sample of torchvision's folder, whose ``loader(path)`` reads and decodes. Reading is timed separately."""
    base, inner = innermost(dataset, index)
    read, decode = timer.steps["read"], timer.steps["decode"]
    before = replace(read)
    timer.call("read", Path(base.samples[inner][0]).read_bytes)
    timer.call("decode", dataset.__getitem__, index)
    decode.cpu_ns -= read.cpu_ns - before.cpu_ns
    decode.wall_ns -= read.wall_ns - before.wall_ns


def _make_in_steps(timer: StepTimer, dataset: object, index: object) -> None:
    """Make a sample with the public methods of a CacheableDataset, without its cache."""
    base, inner = innermost(dataset, index)
    decoded = timer.call("decode", base.decode, timer.call("read", base.read, inner), inner)
    if not getattr(getattr(decoded, "flags", None), "writeable", True):
        decoded = decoded.copy()
    if isinstance(base, ImageDataset):  # its recipe is the whole transform, and timed under its own name
        base.augment(decoded, inner)
    else:
        timer.call("augment", base.augment, decoded, inner)


_STAGES = {_make_of_folder: ("read", "decode"), _make_in_steps: ("read", "decode", "augment")}


@contextmanager
def threads_of_a_worker(part: LoaderPart) -> Iterator[None]:
    """Context manager to give torch as many threads as a worker has: one, if the loader has workers."""
    threads = torch.get_num_threads()
    try:
        if part.loader.num_workers:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


# --- the loader with less work in its transforms ----------------------------------------------------------------------


class Constant:
    """Replaces a transform, and always returns the same result.

    Args:
        made: the result.
        decodes: True for the recipe of an ImageDataset: the whole image is still decoded, as that is not a transform's
            work.
    """

    crops = False

    def __init__(self, made: Any, *, decodes: bool = False) -> None:
        self.made, self.decodes = made, decodes

    def __call__(self, *args: Any, **named: object) -> Any:
        """Return a new copy of the result."""
        if self.decodes:
            args[0].whole()
        return fresh(self.made)


class _Noting:
    """Calls a transform, and keeps the last arguments and result."""

    made: Any = None
    args: tuple[Any, ...] = ()

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.crops = getattr(transform, "crops", False)  # recipes have this attribute

    def __call__(self, *args: object, **named: Any) -> Any:
        self.made = self.transform(*args, **named)
        self.args = (*args, *named.values())
        return self.made


def _rate_with(session: Session, other: Callable[[Site, _Noting], Any]) -> float | None:
    """The rate of the loaders with other transforms; None if there are none to replace.

    Args:
        session: the session with the loaders.
        other: returns the transform for a site, from the arguments and the result of the user's own for one sample;
            None to keep the user's.
    """
    session.check_memory()
    others: dict[Site, Any] = {}
    for part in session.parts:
        noting = {site: _Noting(site.transform) for site in find_sites(part.loader.dataset)}
        with preserve_state(part.loader):
            with replaced(noting):
                make_sample(part)
            others |= {site: other(site, note) for site, note in noting.items() if note.args}
    others = {site: one for site, one in others.items() if one is not None}
    if not others:
        return None
    with replaced(others):
        return session.rate()


def measure_without_transforms(session: Session) -> None:
    """Measure the rate of the loaders with a constant result in place of each transform.

    Reading, decoding, collating and handing over are unchanged, with the same shapes. Does nothing if there is no
    transform.
    """

    def constant(site: Site, note: _Noting) -> Constant:
        is_recipe = isinstance(site.owner, ImageDataset) and not isinstance(site.held, UserTransform)
        return Constant(note.made, decodes=is_recipe)

    session.note(no_transform_per_s=_rate_with(session, constant))


class UntilSized:
    """The first steps of a pipeline, with their result as a uint8 tensor of shape (C, H, W).

    Args:
        steps: called one after the other, each with the result of the one before.
    """

    def __init__(self, steps: list[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Tensor:
        """Apply the steps."""
        for step in self.steps:
            image = step(image)
        if not isinstance(image, Tensor):
            image = v2.functional.pil_to_tensor(image)
        made: Tensor = image if image.dtype == torch.uint8 else (image * 255).to(torch.uint8)
        return made


def measure_as_uint8(session: Session) -> None:
    """Measure the rate of the loaders with pixel work left to the device: images at their final size, as uint8.

    In a pipeline of transforms (torchvision's ``Compose`` of either version, ``nn.Sequential``), those up to the last
    one that changes the image's size stay in the workers, because a batch needs one size. Later transforms (flips,
    colours, blurs, conversion to floats, normalising) can run for the whole batch in ``device_transform``, and are left
    out here. Does nothing if there is no such pipeline.
    """
    session.note(as_uint8_per_s=_rate_with(session, _until_sized))


def _until_sized(site: Site, note: _Noting) -> UntilSized | None:
    """The steps that would stay in the workers; None for a pipeline without images, or one that ends in uint8 already.

    Also None for images with boxes or masks: the device would have to transform those, too.
    """
    pipeline = site.transform
    if type(pipeline) in (v1.Compose, v2.Compose):
        pipeline = pipeline.transforms
    elif not isinstance(pipeline, nn.Sequential):
        return None
    is_uint8 = isinstance(note.made, Tensor) and note.made.dtype == torch.uint8
    if not list(pipeline) or len(note.args) != 1 or is_uint8 or _size_of(note.made) is None:
        return None
    (image,) = note.args
    sizes = [_size_of(image)]
    for step in pipeline:
        image = step(image)
        sizes.append(_size_of(image))
    changing = [number for number, (before, after) in enumerate(pairwise(sizes), start=1) if before != after]
    return UntilSized(list(pipeline)[: max(changing, default=0)])


def _size_of(image: object) -> list[int] | None:
    """[height, width] of an image; None for anything else."""
    if isinstance(image, Image.Image) or (isinstance(image, Tensor) and image.ndim == 3):
        size: list[int] = v2.functional.get_size(image)
        return size
    return None


# --- only the crops decoded -------------------------------------------------------------------------------------------


class _Files:
    """A SampleSource that reads the files of an image folder."""

    def __init__(self, folder: ImageFolder) -> None:
        self.classes = tuple(folder.classes)
        self.labels = np.array([label for _, label in folder.samples], dtype=np.int64)
        self._paths: list[str] = [path for path, _ in folder.samples]

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, index: int) -> str:
        return self._paths[index]

    def read(self, index: int) -> bytes:
        return Path(self._paths[index]).read_bytes()


def measure_crops(session: Session) -> None:
    """Measure the cost of an image folder's sample, as it is, and with only the crop decoded.

    Each sample is made both ways in turn, with the same random numbers and the user's transform, so that other programs
    slow both down alike. Does nothing for loaders that ImageFolderDataModule cannot replace: see
    :func:`folder_to_crop`.

    Raises:
        DatasetError: a sample cannot be made.
        LoaderError: a sample takes very long.
    """
    part = session.parts[0]
    dataset: AnyDataset = part.loader.dataset
    folder = folder_to_crop(part.loader) if len(session.parts) == 1 else None
    if folder is None:
        return
    timer = StepTimer()
    ways = {timer.step("whole"): dataset, timer.step("crop"): _cropping(dataset, folder)}

    def work(beat: Heartbeat) -> int:
        began, done = time.monotonic(), 0
        for done, index in enumerate(part.first_samples(_MOST_SAMPLES)):
            for name, made_of in ways.items():
                torch.manual_seed(done)
                with naming(dataset, index):
                    timer.call(name, made_of.__getitem__, index)
            if beat.stopped or (done and time.monotonic() - began > session.share_s):
                break
            beat.beat()
            timer.on = True  # the first sample made in each way does not count
        return done

    with preserve_state(part.loader), threads_of_a_worker(part):
        count = not_hanging(work, _SILENT_S, "A sample of the image folder")
    if not count:
        return
    whole_ms, crop_ms = (timer.steps[name].cpu_ns / count / 1e6 for name in ways)
    root = Path(folder.root)
    has_splits = root.name == "train"
    session.note(
        crops=CropTrial(
            folder=str(root.parent if has_splits else root),
            val_fraction=None if has_splits else round(1 - len(dataset) / len(folder), 3),
            whole_ms=whole_ms,
            crop_ms=crop_ms,
        )
    )


def folder_to_crop(loader: DataLoader[Batch]) -> ImageFolder | None:
    """The image folder of a loader that ImageFolderDataModule can replace; None for any other loader.

    Such a loader has a transform that begins with a RandomResizedCrop, RGB images, unchanged labels, each sample once
    in random order, and torch's collate.
    """
    if not with_loaders(LoopFacts(), [loader]).decodes_whole or loader.collate_fn is not default_collate:
        return None
    if type(loader.sampler) is not RandomSampler or loader.sampler.replacement or loader.batch_size is None:
        return None
    folder: AnyDataset = loader.dataset
    while isinstance(folder, Subset):
        folder = folder.dataset
    path = folder.samples[0][0]
    made = folder.loader(path)
    with Image.open(path) as file:
        plain = isinstance(made, Image.Image) and np.array_equal(np.asarray(made), np.asarray(file.convert("RGB")))
    return folder if plain and folder.target_transform is None else None


def _cropping(dataset: AnyDataset, folder: ImageFolder) -> AnyDataset:
    """The same samples with only the crops decoded."""
    if isinstance(dataset, Subset):
        return Subset(_cropping(dataset.dataset, folder), dataset.indices)
    files = _Files(folder)
    return ImageDataset(files, choose_decoder(files, crops=True).decoder, UserTransform(folder.transform))


# --- functions by time ------------------------------------------------------------------------------------------------

_SAMPLING_S = 0.001
"""Time between two samples of the stack."""
_SWITCH_S = 0.0001
"""Longest wait of the sampling thread for the interpreter: later code would be seen instead."""
_SILENT_S = 60.0
"""Seconds after which a batch counts as hanging."""
_MOST_FUNCTIONS = 6
_LEAST_SHARE = 0.05
"""Smallest share of a batch's time for a function to be reported."""
_CLASS_CALLS = {"__call__", "__init__", "forward", "_call_impl", "_wrapped_call_impl"}
"""Methods that are reported as their class."""

Stage = Literal["samples", "collate"]


class StackTally:
    """Times of the stages that make batches, and of the user's functions in them, from samples of the stack.

    Time counts for the user's innermost function, with the name of the call into a library.
    """

    def __init__(self) -> None:
        self._stage: Stage = "samples"
        self._entered = self._sampled = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget all times."""
        self._total: dict[Stage, float] = {"samples": 0.0, "collate": 0.0}
        self._seen: dict[Stage, float] = {"samples": 0.0, "collate": 0.0}
        """Time up to the last sample of the stack in each stage."""
        self._spent: dict[tuple[Stage, CodeType, str, str | None], dict[int, float]] = {}
        """By stage, function, its name, and what it calls: time by line."""

    def enter(self, stage: Stage, now: float) -> None:
        """Begin a stage, and end the previous one."""
        self._total[self._stage] += now - self._entered
        self._stage, self._entered, self._sampled = stage, now, now

    def add(self, frame: FrameType | None, now: float) -> None:
        """Add the time since the last sample, given the innermost ``frame`` of the stack."""
        elapsed, self._sampled = max(0.0, now - self._sampled), now
        self._seen[self._stage] += elapsed
        called: FrameType | None = None
        while frame is not None and not is_users(frame.f_code.co_filename):
            called, frame = frame, frame.f_back
        if frame is not None:
            calls = None if called is None else _name_of_call(called)
            lines = self._spent.setdefault((self._stage, frame.f_code, _name_of(frame), calls), defaultdict(float))
            lines[frame.f_lineno] += elapsed

    def result(self, batches: int) -> tuple[dict[Stage, float], list[FunctionCost]]:
        """Milliseconds per batch by stage, and the functions that take much of them."""
        stage_ms = {stage: 1e3 * total / batches for stage, total in self._total.items()}
        costs = [
            FunctionCost(
                name=name,
                file=code.co_filename,
                line=max(lines, key=lambda line: lines[line]),
                calls=calls,
                stage=stage,
                ms_per_batch=stage_ms[stage] * sum(lines.values()) / (self._seen[stage] or 1.0),
            )
            for (stage, code, name, calls), lines in self._spent.items()
        ]
        least = _LEAST_SHARE * sum(stage_ms.values())
        return stage_ms, [one for one in costs if one.ms_per_batch >= least]


def measure_functions(session: Session) -> None:
    """Measure the time for making and collating samples, over all loaders, and the user's functions in it."""
    made = [time_batches(part, session.share_s / len(session.parts)) for part in session.parts]
    functions = sorted((one for _, found in made for one in found), key=lambda one: -one.ms_per_batch)
    session.note(
        samples_ms=sum(stage_ms["samples"] for stage_ms, _ in made),
        collate_ms=sum(stage_ms["collate"] for stage_ms, _ in made),
        functions=tuple(functions[:_MOST_FUNCTIONS]),
    )


def time_batches(part: LoaderPart, max_s: float) -> tuple[dict[Stage, float], list[FunctionCost]]:
    """Time batches made in this process, with as many threads as a worker would have. The first does not count.

    Args:
        part: a loader with a map-style or an iterable data set.
        max_s: time to take; at least two batches are made.

    Returns:
        Milliseconds per batch by stage, and the user's functions.

    Raises:
        LoaderError: no batch can be made in this process, or one takes very long.
    """
    tally = StackTally()

    def collate(beat: Heartbeat, samples: list[Sample]) -> None:
        tally.enter("collate", time.perf_counter())
        part.loader.collate_fn(samples)
        tally.enter("samples", time.perf_counter())
        beat.beat()

    def work(beat: Heartbeat) -> int:
        plain, number = _in_this_process(part, partial(collate, beat)), -1
        with sampled(tally):
            began = time.perf_counter()
            for number, _ in enumerate(chain(plain, plain)):  # twice: there may be only one batch
                tally.enter("samples", time.perf_counter())
                if number == 0:
                    tally.clear()
                elif time.perf_counter() - began > max_s or beat.stopped:
                    break
        return number

    with preserve_state(part.loader), threads_of_a_worker(part):
        try:
            counted = not_hanging(work, max(max_s, _SILENT_S), "A batch that is made in this process")
        except FeedError:
            raise
        except Exception as error:
            raise LoaderError(f"no batch can be made in this process: {type(error).__name__}: {error}") from error
    if counted < 1:
        raise LoaderError("the loader gives no batch")
    return tally.result(counted)


def _in_this_process(part: LoaderPart, collate: Callable[[Any], object]) -> DataLoader[Batch]:
    """A plain loader of the same samples without workers."""
    loader = part.loader
    order: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if part.stream:
        order = {"batch_size": loader.batch_size}
    elif loader.batch_sampler is None:
        order = {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, collate_fn=collate, generator=loader.generator, **order)


@contextmanager
def sampled(tally: StackTally) -> Iterator[None]:
    """Sample the stack of this thread about every millisecond, as a context manager."""
    ident, done = threading.get_ident(), threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLING_S):
            tally.add(sys._current_frames().get(ident), time.perf_counter())

    before = sys.getswitchinterval()
    sampling = threading.Thread(target=sample, name="lightning-feed-sampling", daemon=True)
    tally.enter("samples", time.perf_counter())
    sys.setswitchinterval(min(before, _SWITCH_S))
    sampling.start()
    try:
        yield
    finally:
        done.set()
        sampling.join()
        sys.setswitchinterval(before)


def _name_of(frame: FrameType) -> str:
    """Name of a frame's function, such as ``Birds.__getitem__``."""
    code = frame.f_code
    whole: str | None = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if whole is not None:
        return whole.rpartition("<locals>.")[2]
    return f"{type(frame.f_locals['self']).__name__}.{code.co_name}" if "self" in frame.f_locals else code.co_name


def _name_of_call(frame: FrameType) -> str:
    """The name of a call: the class if an object is called, else ``Image.convert``, or the function."""
    name = frame.f_code.co_name
    if "self" not in frame.f_locals:
        return name
    kind = type(frame.f_locals["self"]).__name__
    return kind if name in _CLASS_CALLS else f"{kind}.{name}"
