"""X5: what the device decodes of an image folder, with nothing beside it: ``backend="nvjpeg"``, on the user's files."""

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_feed.load.encoded_batch import EncodedImageDataset, collate_encoded
from lightning_feed.load.image_dataset import ImageDataset
from lightning_feed.load.image_recipe import EvalRecipe, TrainRecipe
from lightning_feed.load.untouched import untouched
from lightning_feed.transfer.device_decode import decode_batch
from lightning_feed.watch.experiments.sample_files import innermost
from lightning_feed.watch.experiments.subject import Part

MOST_IMAGES = 256
"""Of one list: a longer one tells no more, and takes its time to be read."""
FEWEST_ROUNDS = 2


def measure_device_decode(
    parts: tuple[Part, ...],
    device: torch.device,
    max_s: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] | None = None,
) -> float | None:
    """Batches per second, by the same files and crops as the loader's first ones; None where that is not possible.

    It is possible for one loader, of images that are decoded in its workers and go through no transform of the user's.

    Args:
        parts: the loaders.
        device: that decodes.
        max_s: when no further round begins.
        clock: seconds.
        wait: waits until the device is done; None for CUDA's own.

    Raises:
        DatasetError: an image cannot be read or decoded, with its name.
        MissingExtraError: this torchvision has no nvJPEG.
    """
    if len(parts) != 1 or parts[0].stream:
        return None
    (part,) = parts
    wait = wait or (lambda: torch.cuda.synchronize(device))
    with untouched(part.loader):
        samples = [innermost(part.loader.dataset, index) for index in part.first_samples(MOST_IMAGES)]
        dataset = samples[0][0] if samples else None
        if dataset is None or not _decodes_here(dataset) or any(base is not dataset for base, _ in samples):
            return None
        encoded = EncodedImageDataset(dataset.source, dataset.decoder, dataset.recipe, bad_samples=dataset.bad_samples)
        batch = collate_encoded([encoded[index] for _, index in samples]).to(device)
        decode_batch(batch, encoded)  # makes the decoder, and the memory that it takes
        wait()
        began, rounds = clock(), 0
        while rounds < FEWEST_ROUNDS or clock() - began < max_s:
            decode_batch(batch, encoded)
            wait()
            rounds += 1
        images_per_s = rounds * len(batch) / (clock() - began)
    return images_per_s / part.batch_size


def _decodes_here(dataset: Any) -> bool:
    return (
        type(dataset) in (ImageDataset, EncodedImageDataset)
        and isinstance(dataset.recipe, (TrainRecipe, EvalRecipe))
        and (dataset.cache is None or dataset.cache.kind == "bytes")
    )
