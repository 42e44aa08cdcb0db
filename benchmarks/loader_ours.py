"""The rows of `loader.py` that are this package's own, as a user gets them from ImageFolderDataModule."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from loader_process import Feed, Job, Skip, middle
from PIL import Image


def ours(
    job: Job,
    *,
    quality: Literal["exact", "near", "fast"] = "exact",
    workers: Literal["process", "thread"] = "thread",
    decoded: bool = False,
    floats: bool = False,
) -> Feed:
    """``decoded`` reads a pack of pixels. ``floats`` runs ``device_transform`` on the CPU, as the reference does."""
    from lightning_feed import ImageFolderDataModule, LoaderSettings
    from lightning_feed.images.crop import SourceImage
    from lightning_feed.storage import pack

    root = job.folder
    if decoded:
        _check_room(job)
        root = job.scratch / "pixels"
        pack(job.folder, root, decoded=True, force=True)
    made = ImageFolderDataModule(
        root,
        job.batch_size,
        image_size=job.size,
        quality=quality,
        loader=LoaderSettings(num_workers=job.workers, workers=workers, persistent_workers=True, pin_memory=False),
    )
    loader = made.train_dataloader()
    choice = made.decoder_choice
    recipe = middle_recipe(job.size, quality)

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield (made.device_transform(batch, "train") if floats else batch)[0]

    def pixels(paths: Sequence[Path]) -> Iterator[np.ndarray]:
        for path in paths:
            data = path.read_bytes()
            picture = SourceImage(choice.decoder.decode(data)) if decoded else SourceImage(data, choice.decoder)
            yield recipe(picture).permute(1, 2, 0).numpy()

    return Feed(epoch, pixels, note=f"decoder {choice.name}")


def on_device(job: Job, *, augmented: bool) -> Feed:
    """on_device=True: on the first CUDA device, else on the CPU, which then does the device's work.

    Without ``augmented`` only the batches are gathered: what is left for the host, whose share on a device is nothing
    per sample.
    """
    from lightning.pytorch import Trainer

    from lightning_feed import ImageFolderDataModule, LoaderSettings
    from lightning_feed.decode.choose import make_decoder
    from lightning_feed.images.crop import SourceImage, SquareRecipe
    from lightning_feed.transfer.device_augment import crop_and_flip

    made = ImageFolderDataModule(
        job.folder,
        job.batch_size,
        image_size=job.size,
        on_device=True,
        loader=LoaderSettings(num_workers=job.workers, workers="thread"),
    )
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        made.trainer = Trainer(accelerator="cuda", devices=1, logger=False, enable_checkpointing=False)
    loader = made.train_dataloader()

    def epoch() -> Iterator[Any]:
        for batch in loader:
            images = (made.device_transform(batch, "train") if augmented else batch)[0]
            yield images if augmented else images[..., : job.size, : job.size]  # kept larger; a view
        if on_cuda:
            torch.cuda.synchronize()

    def pixels(paths: Sequence[Path]) -> Iterator[np.ndarray]:
        decoder, kept = make_decoder("pillow").decoder, SquareRecipe(size=round(job.size * 256 / 224))
        for path in paths:
            decoded = decoder.decode(path.read_bytes())
            height, width = decoded.shape[:2]
            box = np.divide(middle(height, width), (height, width, height, width))
            boxes = torch.tensor(box[None], dtype=torch.float32)
            images = crop_and_flip(kept(SourceImage(decoded))[None], boxes, torch.tensor([False]), job.size)
            yield images[0].round().permute(1, 2, 0).numpy()

    return Feed(epoch, pixels if augmented else None, note="on CUDA" if on_cuda else "the CPU does the device's work")


def middle_recipe(size: int, quality: Literal["exact", "near", "fast"] = "exact") -> Any:
    """Of which each box is the largest square in the middle."""
    from lightning_feed.images.crop import TrainRecipe

    # Boxes of the whole area and square do not fit, so that the recipe takes the middle, as torchvision's does.
    return TrainRecipe(size=size, quality=quality, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip_probability=0.0)


def _check_room(job: Job) -> None:
    files: Iterable[Path] = job.files
    needed = 0
    for path in files:
        with Image.open(path) as image:
            needed += 3 * image.width * image.height
    from lightning_feed.load.machine import read_machine

    free = read_machine().available_memory_bytes or 0
    if needed > free // 4:
        raise Skip(f"decoded, the images take {needed / 1e9:.1f} GB, more than a quarter of the free memory")
