"""The planted slow step is found by its name, however the pipeline is built, and the pipeline stays as it was."""

import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from diagnosing.made_data import Images, Slow, Stream, burn, session_of
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Subset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import lightning_feed
from lightning_feed.decode.decoders import PillowDecoder
from lightning_feed.diagnosing import samples
from lightning_feed.diagnosing.samples import (
    StackTally,
    StepTimer,
    UntilSized,
    find_sites,
    folder_to_crop,
    measure_as_uint8,
    measure_crops,
    measure_without_transforms,
    name_of,
    replaced,
    sample_costs,
    time_batches,
    timed,
)
from lightning_feed.diagnosing.session import LoaderPart
from lightning_feed.images.crop import Recipe, TrainRecipe, UserTransform
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.load.cacheable import CacheableDataset
from lightning_feed.measure.experiment_results import NamedCost
from lightning_feed.measure.user_code import is_users
from lightning_feed.storage.folder import FolderSource, scan_classes

SLOW_S = 0.004


def _part(dataset: Any, **options: Any) -> LoaderPart:
    return LoaderPart(
        "", DataLoader(dataset, **{"batch_size": 4, "shuffle": not isinstance(dataset, Stream), **options})
    )


def _costs(dataset: Any, samples: int = 5) -> dict[str, NamedCost]:
    found = sample_costs(_part(dataset), 20, samples=samples)
    assert len({cost.name for cost in found}) == len(found)
    return {cost.name: cost for cost in found}


def _without_transforms(dataset: Any) -> float | None:
    session = session_of(_part(dataset).loader)
    measure_without_transforms(session)
    return session.results.no_transform_per_s


class SlowModule(nn.Module):
    def forward(self, image: Any) -> Any:
        burn(SLOW_S)
        return image


class Slow16:
    """Of a PIL image makes a tensor, slowly."""

    def __call__(self, image: Any) -> Any:
        burn(SLOW_S)
        return v1.functional.pil_to_tensor(image)


def slow_function(image: Any) -> Any:
    burn(SLOW_S)
    return image


class Slotted:
    __slots__ = ()

    def __call__(self, image: Any) -> Any:
        burn(SLOW_S)
        return image


PIPELINES = {
    "v1": (v1.Compose([v1.Resize(12), Slow(SLOW_S), v1.RandomHorizontalFlip()]), "Slow"),
    "v2": (v2.Compose([v2.Resize(12), SlowModule(), v2.RandomHorizontalFlip()]), "SlowModule"),
    "sequential": (nn.Sequential(v1.Resize(12), SlowModule(), v1.CenterCrop(8)), "SlowModule"),
    "nested": (v1.Compose([v1.Resize(12), v1.Compose([v1.CenterCrop(8), Slow(SLOW_S)])]), "Slow"),
    "a single step": (Slow(SLOW_S), "Slow"),
    "a function": (slow_function, "slow_function"),
    "a function in a list": (v1.Compose([v1.Resize(12), slow_function]), "slow_function"),
    "slots": (v1.Compose([Slotted(), v1.Resize(12)]), "Slotted"),
    "by chance": (v1.Compose([v1.RandomApply([SlowModule()], p=1.0), v1.Resize(12)]), "RandomApply"),
    "twice": (v1.Compose([v1.Resize(12), v1.Resize(14), Slow(SLOW_S)]), "Slow"),
}


@pytest.mark.parametrize("name", list(PIPELINES))
def test_the_slow_step_is_found_by_name(name: str) -> None:
    pipeline, slow = PIPELINES[name]
    costs = _costs(Images(pipeline))
    assert max(costs.values(), key=lambda cost: cost.cpu_ms).name == slow
    assert costs[slow].cpu_ms == pytest.approx(SLOW_S * 1e3, rel=0.5)
    assert costs[slow].wall_ms >= 0.9 * costs[slow].cpu_ms
    assert next(iter(costs)) == "load"
    assert costs["load"].cpu_ms < SLOW_S * 1e3 / 2  # what the steps took is not counted a second time


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, range(10)), lambda d: ConcatDataset([Images(), d, d])])
def test_transforms_under_other_data_sets(wrap: Any) -> None:
    dataset = wrap(Images(v1.Compose([Slow(SLOW_S)])))
    part = _part(dataset, sampler=range(len(dataset) - 5, len(dataset)), shuffle=None)
    assert [cost.name for cost in sample_costs(part, 20, samples=4)] == ["load", "Slow"]


def test_streams() -> None:
    costs = _costs(Stream(v1.Compose([Slow(SLOW_S)])))
    assert list(costs) == ["load", "Slow"]
    assert costs["Slow"].cpu_ms == pytest.approx(SLOW_S * 1e3, rel=0.5)


def test_nothing_of_the_users_is_changed() -> None:
    slow = Slow(0.0)
    pipeline = v1.Compose([v1.Resize(12), slow])
    dataset = Images(pipeline)
    steps = list(pipeline.transforms)
    torch.set_num_threads(2)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    sample_costs(_part(dataset, num_workers=1), 20, samples=4)
    _without_transforms(dataset)
    assert dataset.transform is pipeline
    assert pipeline.transforms == steps
    assert [type(step) for step in steps] == [v1.Resize, Slow]
    assert (dataset.reads, slow.calls) == (0, 0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()
    assert torch.get_num_threads() == 2


def augment(image: Any) -> Any:
    """Called as a step of our own data sets is."""
    return image


def test_image_folders_tell_reading_from_decoding(class_folders: Path) -> None:
    dataset = ImageFolder(class_folders, transform=v1.Compose([v1.RandomResizedCrop(16), Slow(SLOW_S)]))
    dataset.transform.transforms.insert(1, v1.ToTensor())
    assert list(_costs(dataset)) == ["read", "decode", "RandomResizedCrop", "ToTensor", "Slow"]
    assert list(_costs(Subset(dataset, range(1, 8)))) == ["read", "decode", "RandomResizedCrop", "ToTensor", "Slow"]
    dataset.transform = augment
    assert list(_costs(dataset)) == ["read", "decode", "augment"]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (TrainRecipe(size=16), ["TrainRecipe"]),
        (UserTransform(v1.Compose([v1.RandomResizedCrop(16), Slow16()])), ["RandomResizedCrop", "Slow16"]),
    ],
)
def test_our_images(class_folders: Path, recipe: Recipe, names: list[str]) -> None:
    source = FolderSource(class_folders, scan_classes(class_folders))
    dataset = ImageDataset(source, PillowDecoder(), recipe)
    costs = _costs(dataset)
    assert list(costs) == ["read", "decode", *names]
    assert all(cost.cpu_ms > 0 for cost in costs.values())
    assert dataset.recipe is recipe
    assert (_without_transforms(dataset) or 0) > 0
    assert dataset.recipe is recipe


DECODED: list[int] = []


class Counting(PillowDecoder):
    def decode(self, data: Any) -> Any:
        DECODED.append(len(data))
        return super().decode(data)


class Staged(CacheableDataset):
    def __len__(self) -> int:
        return 20

    def read(self, index: int) -> bytes:
        return bytes([index]) * 10

    def decode(self, data: Any, index: int) -> Any:
        burn(SLOW_S)
        return np.frombuffer(data, np.uint8)

    def augment(self, decoded: Any, index: int) -> Any:
        decoded += 1
        return decoded


def test_stages_of_a_cacheable_data_set() -> None:
    costs = _costs(Staged())
    assert list(costs) == ["read", "decode", "augment"]
    assert costs["decode"].cpu_ms > 5 * (costs["read"].cpu_ms + costs["augment"].cpu_ms)


def test_without_transforms_the_loader_is_as_fast_as_if_they_were_free() -> None:
    slow = Images(v1.Compose([Slow(0.01), v1.Resize(12)]))
    assert (_without_transforms(slow) or 0) > 10 * (1 / (4 * 0.01))
    assert _without_transforms(Images()) is None


def test_a_timed_copy_does_the_same() -> None:
    torch.manual_seed(0)
    pipeline = v2.Compose([v2.RandomCrop(5), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
    image = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8)
    twin = timed(pipeline, StepTimer(on=True))
    for seed in range(5):
        torch.manual_seed(seed)
        expected = pipeline(image)
        torch.manual_seed(seed)
        assert torch.equal(twin(image), expected)
    assert isinstance(twin, v2.Compose)
    assert all(isinstance(step, type(was)) for step, was in zip(twin.transforms, pipeline.transforms, strict=True))


def _albumentations() -> Any:
    inner = [albumentations.GaussianBlur(p=1.0), albumentations.HorizontalFlip(p=0.5)]
    return albumentations.Compose(
        [
            albumentations.RandomResizedCrop((16, 16)),
            albumentations.ColorJitter(p=1.0),  # keeps its four functions under the name `transforms`
            albumentations.Sequential(inner, p=1.0),
            albumentations.OneOf([albumentations.Blur(p=1.0), albumentations.MedianBlur(p=1.0)], p=1.0),
            albumentations.Normalize(),
        ],
        seed=3,
    )


class Photos(Images):
    def __getitem__(self, index: int) -> Any:
        assert self.transform is not None
        photo = np.full((32, 32, 3), index, np.uint8)
        return self.transform(image=photo)["image"]  # type: ignore[call-arg]


def test_timed_steps_of_albumentations_draw_and_give_what_they_did_and_are_not_registered() -> None:
    photo = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    registry = dict(albumentations.core.serialization.SERIALIZABLE_REGISTRY)
    plain, twin = _albumentations(), timed(_albumentations(), StepTimer(on=True))
    for _ in range(5):
        assert np.array_equal(plain(image=photo)["image"], twin(image=photo)["image"])
    assert isinstance(twin, albumentations.Compose)
    assert isinstance(twin.transforms[2], albumentations.Sequential)
    assert registry == albumentations.core.serialization.SERIALIZABLE_REGISTRY


def test_names_and_sites() -> None:
    assert name_of(Slow(0).__call__) == "__call__"
    assert name_of(lambda image: image) == "lambda"
    assert name_of(partial(slow_function)) == "partial"
    dataset = Images(slow_function)
    dataset.helper = slow_function  # type: ignore[attr-defined]
    dataset.collate_fn = slow_function  # type: ignore[attr-defined]
    assert [(site.owner, site.attribute) for site in find_sites(dataset)] == [(dataset, "transform")]
    with pytest.raises(KeyboardInterrupt), replaced(dict.fromkeys(find_sites(dataset))):
        raise KeyboardInterrupt
    assert dataset.transform is slow_function


# --- pixel work left to the device ------------------------------------------------------------------------------------

TO_FLOATS = {v1: [v1.ToTensor()], v2: [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]}


def _as_uint8(dataset: Any) -> float | None:
    session = session_of(_part(dataset).loader)
    measure_as_uint8(session)
    return session.results.as_uint8_per_s


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[UntilSized]:
    """The pipelines that were timed."""
    made: list[UntilSized] = []

    class Kept(UntilSized):
        def __init__(self, steps: list[Any]) -> None:
            super().__init__(steps)
            made.append(self)

    monkeypatch.setattr(samples, "UntilSized", Kept)
    return made


@pytest.mark.parametrize("version", [v1, v2])
def test_steps_up_to_the_last_that_changes_the_size_stay(class_folders: Path, version: Any, seen: Any) -> None:
    steps = [version.Resize((20, 30)), version.RandomCrop(16), version.RandomHorizontalFlip(), *TO_FLOATS[version]]
    transform = version.Compose([*steps, version.Normalize([0.5] * 3, [0.5] * 3)])
    dataset = ImageFolder(str(class_folders), transform)
    assert (_as_uint8(dataset) or 0) > 0
    assert seen[0].steps == steps[:2]
    made = seen[0](dataset.loader(dataset.samples[0][0]))
    assert made.dtype == torch.uint8
    assert made.shape == (3, 16, 16)
    assert dataset.transform is transform
    assert dataset.transforms.transform is transform


@pytest.mark.parametrize(
    "transform",
    [
        None,
        lambda image: image,
        v2.Compose([v2.Resize(4), v2.ToDtype(torch.uint8, scale=True)]),  # uint8 already
        v1.Compose([lambda image: image.sum()]),  # a number
        v1.Compose([]),
    ],
)
def test_what_is_no_pipeline_of_pictures_has_no_rate(transform: Any) -> None:
    dataset = Images(transform)
    assert _as_uint8(dataset) is None
    assert dataset.transform is transform


class Pairs(Images):
    """Pictures with masks, which the transform gets together."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.rand(3, 8, 8), torch.rand(3, 8, 8))  # type: ignore[misc]


def test_pictures_with_masks_are_left_alone() -> None:
    assert _as_uint8(Pairs(v2.Compose([v2.Resize(4)]))) is None


# --- only the crops decoded -------------------------------------------------------------------------------------------

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])


def _folder(root: Path, **changed: Any) -> ImageFolder:
    return ImageFolder(str(root), **{"transform": CROP, **changed})


def test_crops_are_timed_in_turn_with_whole_images(class_folders: Path) -> None:
    folder = _folder(class_folders)
    session = session_of(_part(Subset(folder, range(9))).loader)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    measure_crops(session)
    found = session.results.crops
    assert found is not None
    assert (found.folder, found.val_fraction) == (str(class_folders), 0.25)
    assert found.whole_ms > 0 < found.crop_ms
    assert torch.equal(torch.get_rng_state(), before)
    assert folder.transform is CROP


def test_the_samples_are_those_of_the_folder(class_folders: Path) -> None:
    folder = _folder(class_folders)
    cropping = samples._cropping(Subset(folder, [7, 2]), folder)
    for index in range(2):
        torch.manual_seed(3)
        image, label = Subset(folder, [7, 2])[index]
        torch.manual_seed(3)
        cropped, same = cropping[index]
        assert label == same
        assert torch.allclose(image, cropped, atol=0.1)


def test_a_folder_of_splits_is_given_as_a_whole(class_folders: Path) -> None:
    train = class_folders.rename(class_folders.parent / "train")
    session = session_of(_part(_folder(train)).loader)
    measure_crops(session)
    assert session.results.crops is not None
    assert session.results.crops.folder == str(train.parent)
    assert session.results.crops.val_fraction is None


@pytest.mark.parametrize(
    ("folder", "loader"),
    [
        ({"transform": v1.Compose([v1.Resize((16, 16)), v1.ToTensor()])}, {}),
        ({"target_transform": str}, {}),
        ({"loader": lambda path: Image.open(path).convert("L").convert("RGB")}, {}),
        ({}, {"shuffle": False}),
        ({}, {"collate_fn": list}),
        ({}, {"batch_size": None, "shuffle": None}),
        ({}, {"sampler": RandomSampler(range(12), replacement=True), "shuffle": None}),
    ],
)
def test_loaders_that_the_data_module_does_not_replace(class_folders: Path, folder: Any, loader: Any) -> None:
    assert folder_to_crop(_part(_folder(class_folders, **folder), **loader).loader) is None
    assert folder_to_crop(_part(_folder(class_folders)).loader) is not None


# --- the user's functions by time ------------------------------------------------------------------------------------

HERE = __file__


class Jitter(torch.nn.Module):
    """Stands for a transform of a library."""

    def forward(self, image: Any) -> Any:
        return image


def line_of(text: str) -> int:
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line and "line_of" not in line)


class Listed(Images):
    """Its transforms are a list, gone through in ``__getitem__``: no attribute leads to them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [v2.Resize(8), v2.GaussianBlur(63), v2.RandomHorizontalFlip()]

    def __getitem__(self, index: int) -> Any:
        image = torch.rand(3, 200, 200)
        image = self.steps[1](image)  # the blur
        return self.steps[0](image), index


def slow_collate(samples: list[Any]) -> Any:
    burn(0.03)  # while it collates
    return default_collate(samples)


def test_a_step_of_a_list_in_getitem_is_named_with_its_line() -> None:
    stages, functions = time_batches(LoaderPart("", DataLoader(Listed(), batch_size=4)), 0.3)
    dearest = functions[0]
    assert (dearest.name, dearest.file, dearest.calls, dearest.stage) == (
        "Listed.__getitem__",
        HERE,
        "GaussianBlur",
        "samples",
    )
    assert dearest.line == line_of("# the blur")
    assert 0 < dearest.ms_per_batch <= stages["samples"]
    assert stages["samples"] > stages["collate"]


def test_collating_that_takes_the_time_is_told_as_that() -> None:
    stages, functions = time_batches(LoaderPart("", DataLoader(Images(), batch_size=4, collate_fn=slow_collate)), 0.3)
    assert stages["collate"] > stages["samples"]
    assert {one.stage for one in functions} == {"collate"}
    assert functions[0].name == "burn"  # of the user's too, and further in


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": None}, {"batch_size": 4, "num_workers": 1}])
@pytest.mark.parametrize("kind", [Images, Stream])
def test_kinds_of_loaders(kind: Callable[..., Dataset[Any]], options: dict[str, Any]) -> None:
    dataset: Any = kind(Slow(0.005))
    random, interval = torch.get_rng_state(), sys.getswitchinterval()
    stages, functions = time_batches(LoaderPart("", DataLoader(dataset, **options)), 0.2)
    assert stages["samples"] >= 5.0
    assert functions[0].name == "burn"
    assert dataset.transform.calls == 0  # put back
    assert torch.equal(random, torch.get_rng_state())
    assert sys.getswitchinterval() == interval


class Empty(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Failing(Images):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("label")


def frames_of(call: Callable[[Callable[..., Any]], Any]) -> Any:
    """The stack at the place where ``call`` calls what it is given."""
    found = []
    call(lambda *given: found.append(sys._getframe(1)))
    return found[0]


def test_time_goes_to_the_innermost_function_of_the_users_and_names_what_it_calls() -> None:
    class Aug:
        def run(self, note: Callable[..., Any]) -> None:
            note()

    class Library(dict):  # type: ignore[type-arg]
        def __missing__(self, key: str) -> Any:
            return key

    def in_a_library(note: Callable[..., Any]) -> None:
        note_module = torch.nn.Module()
        note_module.forward = lambda: note(0)  # type: ignore[method-assign]
        note_module()

    tally = StackTally()
    tally.enter("samples", 10.0)
    tally.clear()
    tally.add(frames_of(Aug().run), 13.0)
    tally.add(None, 14.0)  # the thread is gone
    tally.enter("collate", 18.0)
    tally.add(frames_of(in_a_library), 20.0)
    tally.enter("samples", 20.0)
    stages, found = tally.result(batches=2)
    assert stages == {"samples": 4000, "collate": 1000}
    assert [(one.name, one.calls, one.stage, one.ms_per_batch) for one in found] == [
        ("Aug.run", None, "samples", 3000),  # 3 of 4 seconds that were seen
        ("<lambda>", None, "collate", 1000),
    ]
    tally.enter("samples", 60.0)
    assert [one.name for one in tally.result(batches=2)[1]] == ["Aug.run"]  # the other takes too little


def test_what_is_the_users() -> None:
    assert is_users(HERE)
    assert is_users("<ipython-input-3-ab>")
    for library in (torch.nn.modules.module.__file__, sys.modules["threading"].__file__, "<frozen importlib>"):
        assert not is_users(str(library))
    ours = Path(lightning_feed.__file__).parent
    assert not is_users(f"{ours}/cli.py")
    assert is_users(f"{ours}_runs/train.py")


@pytest.mark.parametrize("project", ["src/app/train.py", "train.py", "share/birds/1.jpg"])
def test_a_project_below_the_prefix_of_python_is_the_users(project: str) -> None:
    """As in an image whose Python is in /usr and whose project is in /usr/src/app."""
    assert is_users(f"{sys.prefix}/{project}")
    assert not is_users(f"{sysconfig.get_paths()['purelib']}/{project}")
