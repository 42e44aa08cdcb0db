"""The loader with less work: constant transforms, pixel work left to the device, only the crops decoded."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms as v1
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Subset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_feed.data.image_backends import choose_decoder
from lightning_feed.diagnosing.samples import MOST_SAMPLES, Site, StepTimer, find_sites, replaced
from lightning_feed.diagnosing.session import (
    SILENT_S,
    Session,
    fresh,
    make_sample,
    naming,
    not_hanging,
    threads_of_a_worker,
)
from lightning_feed.images.crop import UserTransform
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.load.kinds import AnyDataset, Batch
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import CropTrial
from lightning_feed.measure.facts import with_loaders
from lightning_feed.measure.measurements import LoopFacts
from lightning_feed.trials.cloning import Heartbeat


class Constant:
    """Replaces a transform, and always returns the same result.

    Args:
        made: the result.
        decodes: True for the recipe of an ImageDataset: the whole image is still decoded, as that is not a transform's
            work.
    """

    crops = False

    def __init__(self, made: Any, *, decodes: bool = False) -> None:
        self.made = made
        self.decodes = decodes

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
        other: returns the replacement for a site's transform, given the arguments and the result that the user's
            transform had for one sample; None to keep the user's transform.
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
        began = time.monotonic()
        done = 0
        for done, index in enumerate(part.first_samples(MOST_SAMPLES)):
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
        count = not_hanging(work, SILENT_S, "A sample of the image folder")
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
