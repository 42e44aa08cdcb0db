"""Experiments that give the loader less work: constant transforms, and decoding only the crops."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, Subset, default_collate
from torchvision.datasets import ImageFolder

from lightning_feed.diagnosing.parts import (
    SILENT_S,
    NotMeasurable,
    fresh,
    make_sample,
    naming,
    not_hanging,
    threads_of_a_worker,
)
from lightning_feed.diagnosing.samples import MOST_SAMPLES, Site, StepTimer, find_sites, replaced
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import MissingExtraError
from lightning_feed.images.backends import choose_decoder
from lightning_feed.images.choose import make_decoder
from lightning_feed.images.crop import UserTransform
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.load.kinds import AnyDataset, Batch
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import CropTrial
from lightning_feed.measure.facts import loader_facts
from lightning_feed.trials.loader_rate import Heartbeat


class ConstantTransform:
    """Replaces a transform, and always returns the same result.

    Args:
        result: the result.
        decodes: True for the recipe of an ImageDataset, which still has to decode the whole image, because decoding is
            not the work of a transform.
    """

    crops = False

    def __init__(self, result: Any, *, decodes: bool = False) -> None:
        self.result = result
        self.decodes = decodes

    def __call__(self, *args: Any, **named: object) -> Any:
        """Return a new copy of the result."""
        if self.decodes:
            args[0].whole()
        return fresh(self.result)


class _Noting:
    """Calls a transform, and keeps the last result."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.crops = getattr(transform, "crops", False)  # recipes have this attribute
        self.result: Any = None
        self.called = False

    def __call__(self, *args: object, **named: Any) -> Any:
        self.result = self.transform(*args, **named)
        self.called = True
        return self.result


def measure_without_transforms(session: Session) -> None:
    """Measure the rate of the loaders with a constant result in place of each transform.

    Reading, decoding, collating and handing over stay the same, and so do all shapes. Does nothing if there is no
    transform.
    """
    session.check_memory()
    constants: dict[Site, ConstantTransform] = {}
    for part in session.parts:
        noting = {site: _Noting(site.transform) for site in find_sites(part.loader.dataset)}
        with preserve_state(part.loader), replaced(noting):
            make_sample(part)
        for site, transform in noting.items():
            if transform.called:
                is_recipe = isinstance(site.owner, ImageDataset) and not isinstance(site.held, UserTransform)
                constants[site] = ConstantTransform(transform.result, decodes=is_recipe)
    if constants:
        with replaced(constants):
            session.note(no_transform_per_s=session.rate())


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
    """Measure the cost of an image folder's sample with the whole image decoded, and with only the crop decoded.

    Each sample is made both ways in turn, with the same random numbers and the user's transform, so that other programs
    slow both down alike. Does nothing for loaders that ImageFolderDataModule cannot replace: see
    :func:`folder_to_crop`.

    Raises:
        NotMeasurable: no decoder that can decode a part of an image is installed.
        DatasetError: a sample cannot be made.
        LoaderError: a sample takes very long.
    """
    part = session.parts[0]
    dataset: AnyDataset = part.loader.dataset
    folder = folder_to_crop(part.loader)
    if len(session.parts) > 1 or folder is None:
        return
    try:
        make_decoder("turbo-region")
    except MissingExtraError as error:
        raise NotMeasurable(str(error)) from error
    timer = StepTimer()
    whole = timer.step("whole")
    crop = timer.step("crop")
    datasets = {whole: dataset, crop: _cropping(dataset, folder)}

    def work(beat: Heartbeat) -> int:
        began = time.monotonic()
        done = 0
        for done, index in enumerate(part.first_samples(MOST_SAMPLES)):
            for name, made_of in datasets.items():
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
    root = Path(folder.root)
    val_fraction = None
    if root.name == "train":  # the folder has splits of its own
        root = root.parent
    else:
        val_fraction = round(1 - len(dataset) / len(folder), 3)
    session.note(
        crops=CropTrial(
            folder=str(root),
            val_fraction=val_fraction,
            whole_ms=timer.steps[whole].cpu_ns / count / 1e6,
            crop_ms=timer.steps[crop].cpu_ns / count / 1e6,
        )
    )


def folder_to_crop(loader: DataLoader[Batch]) -> ImageFolder | None:
    """Return the image folder of a loader that ImageFolderDataModule can replace; None for any other loader.

    Such a loader has a transform that begins with a RandomResizedCrop, RGB images, no ``target_transform``, a
    RandomSampler without replacement, and torch's ``default_collate``.
    """
    if not loader_facts([loader]).decodes_whole or loader.collate_fn is not default_collate:
        return None
    if type(loader.sampler) is not RandomSampler or loader.sampler.replacement or loader.batch_size is None:
        return None
    folder: AnyDataset = loader.dataset
    while isinstance(folder, Subset):
        folder = folder.dataset
    if not _loads_rgb(folder) or folder.target_transform is not None:
        return None
    return folder


def _loads_rgb(folder: AnyDataset) -> bool:
    """Return True if a folder loads its first image as an RGB image of Pillow."""
    path = folder.samples[0][0]
    image = folder.loader(path)
    if not isinstance(image, Image.Image):
        return False
    with Image.open(path) as file:
        return np.array_equal(np.asarray(image), np.asarray(file.convert("RGB")))


def _cropping(dataset: AnyDataset, folder: ImageFolder) -> AnyDataset:
    """Return a dataset of the same samples that decodes only the crops."""
    if isinstance(dataset, Subset):
        return Subset(_cropping(dataset.dataset, folder), dataset.indices)
    files = _Files(folder)
    return ImageDataset(files, choose_decoder(files, crops=True).decoder, UserTransform(folder.transform))
