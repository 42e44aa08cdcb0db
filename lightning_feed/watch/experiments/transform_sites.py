"""Where a data set keeps its transforms, and copies of them whose steps are timed by name."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from lightning_feed.load.encoded_batch import EncodedImageDataset
from lightning_feed.load.given_transform import GivenTransform
from lightning_feed.load.image_dataset import ImageDataset

_NAMES = {
    *("transform", "transforms", "target_transform", "transform_fn", "tfm", "tfms", "preprocess", "preprocessing"),
    *("augment", "augmentation", "augmentations", "aug", "augs"),
}
_PACKAGES = ("torchvision.transforms", "torchaudio.transforms", "albumentations", "kornia", "monai.transforms")
_BY_CHANCE = ("RandomApply", "RandomChoice", "RandomOrder", "OneOf", "SomeOf", "OneOrOther")
"""Containers of which each call uses a part only: timed as one step."""
_DEEPEST = 6


@dataclass(frozen=True)
class Site:
    """An attribute that holds a transform."""

    owner: Any
    attribute: str

    @property
    def transform(self) -> Any:
        """What stands there."""
        return vars(self.owner)[self.attribute]

    def put(self, transform: Any) -> None:
        """Put another one there, past whatever the owner does about attributes."""
        vars(self.owner)[self.attribute] = transform


@contextmanager
def replaced(sites: list[Site], made: Callable[[Site], Any]) -> Iterator[None]:
    """Within it, each site holds what is made for it; afterwards, what it held before."""
    before = [(site, site.transform) for site in sites]
    try:
        for site, _ in before:
            site.put(made(site))
        yield
    finally:
        for site, transform in before:
            site.put(transform)


def find_sites(dataset: Any) -> list[Site]:
    """The transforms of a data set and of the data sets in it: subsets, concatenations, wrappers."""
    found: dict[tuple[int, str], Site] = {}
    for one in data_sets_in(dataset):
        for owner, name in _attributes(one):
            found.setdefault((id(owner), name), Site(owner, name))
    return list(found.values())


def data_sets_in(dataset: Any, depth: int = 0) -> Iterator[Any]:
    """A data set, and those that it holds in its attributes or in lists there."""
    yield dataset
    if depth >= _DEEPEST:
        return
    for value in list(getattr(dataset, "__dict__", {}).values()):
        for held in value[:100] if isinstance(value, (list, tuple)) else (value,):
            if isinstance(held, Dataset) and held is not dataset:
                yield from data_sets_in(held, depth + 1)


def _attributes(dataset: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(dataset, ImageDataset):
        if not isinstance(dataset, EncodedImageDataset):  # that one only draws by its recipe, and others apply it
            yield dataset, "recipe"
        return
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if value is None or isinstance(value, (type, Dataset)):
            continue
        if type(value).__name__ == "StandardTransform":  # torchvision's pair of the two that it is made of
            yield from ((value, inner) for inner in ("transform", "target_transform") if getattr(value, inner, None))
        elif callable(value) and (name.lstrip("_") in _NAMES or type(value).__module__.startswith(_PACKAGES)):
            yield dataset, name


@dataclass
class Spent:
    """What a step took so far, in nanoseconds, without the steps in it."""

    name: str
    container: bool = False
    """Whether it is there to call other steps."""
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
    steps: list[Spent] = field(default_factory=list)
    _inner: tuple[int, int] = (0, 0)
    """CPU and wall time of the steps in the present one."""

    def step(self, name: str, *, container: bool = False) -> Spent:
        """A new step; a name that is taken gets a number."""
        same = sum(one.name == name or one.name.startswith(f"{name} (") for one in self.steps)
        self.steps.append(Spent(f"{name} ({same + 1})" if same else name, container))
        return self.steps[-1]

    def call(self, spent: Spent, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call, and add the time to the step, but for that of the steps in it."""
        if not self.on:
            return function(*args, **named)
        outer, self._inner = self._inner, (0, 0)
        cpu, wall = self.cpu(), self.wall()
        made = function(*args, **named)
        wall, cpu = self.wall() - wall, self.cpu() - cpu
        spent.wall_ns += wall - self._inner[1]
        spent.cpu_ns += cpu - self._inner[0]
        self._inner = outer[0] + cpu, outer[1] + wall
        return made


def timed(transform: Any, timer: StepTimer) -> Any:
    """A copy of a transform that does the same and times its steps; the transform itself is not written to.

    ``Compose`` and its like are entered: what has a list ``transforms`` of other steps, as of torchvision,
    albumentations and MONAI, and ``nn.Sequential``. Steps keep their class and attributes, and are called as the
    container calls them, with positional arguments or keywords. What a container does beside calling them is its own.
    """
    if isinstance(transform, GivenTransform):
        return GivenTransform(timed(transform.transform, timer), kind="pil" if transform.takes_pil else "tensor")
    twin = _with_timed_steps(transform, timer)
    return _timed_step(transform, timer) if twin is None else _timed_step(twin, timer, container=True)


def _with_timed_steps(transform: Any, timer: StepTimer) -> Any:
    """A copy whose steps are timed; None for what is no container."""
    steps = getattr(transform, "transforms", None)
    if type(transform).__name__ in _BY_CHANCE:
        return None
    if isinstance(transform, nn.Sequential):
        return _with_modules(transform, {name: timed(step, timer) for name, step in transform._modules.items()})
    if isinstance(steps, nn.ModuleList):
        inner = _with_modules(steps, {name: timed(step, timer) for name, step in steps._modules.items()})
        return _with_modules(transform, {**transform._modules, "transforms": inner})
    if isinstance(steps, (list, tuple)) and steps and all(map(callable, steps)) and _calls(transform, steps):
        twin = copy.copy(transform)
        twin.__dict__["transforms"] = type(steps)(timed(step, timer) for step in steps)
        return twin
    return None


def _calls(transform: Any, steps: Sequence[Any]) -> bool:
    """Whether they are steps, and not the functions that a single step is made of, as albumentations' ColorJitter."""
    named = any("Compose" in kind.__name__ for kind in type(transform).__mro__)
    return named or not all(isinstance(step, (FunctionType, BuiltinFunctionType)) for step in steps)


def _with_modules(module: Any, modules: dict[str, Any]) -> Any:
    twin = copy.copy(module)
    twin.__dict__["_modules"] = modules
    return twin


def _timed_step(step: Any, timer: StepTimer, *, container: bool = False) -> Any:
    kind = type(step)
    spent = timer.step(name_of(step), container=container)
    if hasattr(step, "__dict__") and callable(getattr(kind, "__call__", None)):  # noqa: B004

        def call(self: Any, *args: Any, **named: Any) -> Any:
            return timer.call(spent, lambda *a, **n: kind.__call__(self, *a, **n), *args, **named)

        try:
            twin = copy.copy(step)
            # type.__new__: a class of classes may note every one that it makes, as that of albumentations does.
            members = {"__call__": call, "__module__": kind.__module__}
            object.__setattr__(twin, "__class__", type.__new__(type(kind), kind.__name__, (kind,), members))
        except TypeError:
            return _Timed(step, spent, timer)  # functions, and classes that are laid out otherwise
        else:
            return twin
    return _Timed(step, spent, timer)


class _Timed:
    """Stands for a step that cannot be copied."""

    def __init__(self, step: Any, spent: Spent, timer: StepTimer) -> None:
        self._step, self._spent, self._timer = step, spent, timer

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._timer.call(self._spent, self._step, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._step, name)


def name_of(step: Any) -> str:
    """What users call a step: its class, or the function's name."""
    function = getattr(step, "__func__", step)
    name = getattr(function, "__name__", None) or type(step).__name__
    return str(name).replace("<lambda>", "lambda")
