"""The device's part: how fast batches are copied to it, and how fast it decodes the images of a folder."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_feed.errors import FeedError
from lightning_feed.load.crop import EvalRecipe, TrainRecipe
from lightning_feed.load.image_dataset import ImageDataset, collate_encoded
from lightning_feed.load.random_state import preserve_state
from lightning_feed.transfer.batch_tree import tensors
from lightning_feed.transfer.gpu_decode import decode_batch
from lightning_feed.watch.experiments.session import LeftOut, Part, Session, counted_s
from lightning_feed.watch.experiments.storage import innermost

BUFFER_BYTES = 64 << 20
_REPEATS = 7
MOST_IMAGES = 256
"""Decoded together: a longer list tells no more, and takes its time to be read."""
FEWEST_ROUNDS = 2


def measure_copies(session: Session) -> None:
    """Copy a buffer of 64 MiB and the first batch to a CUDA device, several times each; medians.

    Raises:
        LeftOut: why there is nothing to measure.
    """
    device = session.device
    if device is None or device.type == "cpu":
        raise LeftOut("nothing is copied: the device is the CPU")
    if device.type != "cuda":
        raise LeftOut(f"copies are timed by CUDA events, and the device is of type '{device.type}'")
    leaves = [tensor for tensor in tensors(session.first) if tensor.device.type == "cpu"]
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in leaves)
    free, _ = torch.cuda.mem_get_info(device)
    if 2 * (batch_bytes + BUFFER_BYTES) > free:
        raise LeftOut(
            f"a batch of {batch_bytes >> 20} MiB and a buffer would take more than half of the free device memory"
        )
    pageable = torch.empty(BUFFER_BYTES, dtype=torch.uint8).fill_(1)  # written: else its pages are not there
    pinned = pageable.pin_memory()
    target = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
    gb_ms = BUFFER_BYTES / 1e6
    session.note(
        pinned_gb_per_s=gb_ms / _median_ms(lambda: target.copy_(pinned, non_blocking=True), device),
        pageable_gb_per_s=gb_ms / _median_ms(lambda: target.copy_(pageable), device),
        copy_ms=_median_ms(lambda: [tensor.to(device, non_blocking=True) for tensor in leaves], device),
    )


def _median_ms(copy: Callable[[], object], device: torch.device) -> float:
    """Milliseconds between two events around the copy; the first two times do not count."""
    taken: list[float] = []
    with torch.cuda.device(device):
        for _ in range(2 + _REPEATS):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)
            start.record()
            copy()
            end.record()
            end.synchronize()
            taken.append(float(start.elapsed_time(end)))
    return statistics.median(taken[2:])


def measure_device_decode(session: Session) -> None:
    """Decode images of the folder on the device itself (``backend="nvjpeg"``), with nothing beside it.

    Nothing is noted where that is not possible.

    Raises:
        LeftOut: it failed.
    """
    if session.device is None or session.device.type != "cuda" or len(session.parts) != 1:
        return
    try:
        per_s = decode_rate(session.parts[0], session.device, counted_s(session.share_s))
    except (FeedError, RuntimeError) as error:  # of nvJPEG, or memory on the device
        raise LeftOut(str(error).partition("\n")[0]) from error
    session.note(device_decode_per_s=per_s)


def decode_rate(
    part: Part,
    device: torch.device,
    max_s: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[torch.device], object] = torch.cuda.synchronize,
) -> float | None:
    """Batches per second, by the same files and crops as the loader's first ones; None where that is not possible.

    It is possible for images that are decoded in the workers and go through no transform of the user's.

    Args:
        part: the loader.
        device: that decodes.
        max_s: when no further round begins.
        clock: seconds.
        wait: waits until the device is done.

    Raises:
        DatasetError: an image cannot be read or decoded, with its name.
        MissingExtraError: this torchvision has no nvJPEG.
    """
    if part.stream:
        return None
    with preserve_state(part.loader):
        samples = [innermost(part.loader.dataset, index) for index in part.first_samples(MOST_IMAGES)]
        dataset: Any = samples[0][0] if samples else None
        if not _decodes_images(dataset) or any(base is not dataset for base, _ in samples):
            return None
        encoded = ImageDataset(
            dataset.source, dataset.decoder, dataset.recipe, bad_samples=dataset.bad_samples, encoded=True
        )
        batch = collate_encoded([encoded[index] for _, index in samples]).to(device)
        decode_batch(batch, encoded)  # makes the decoder, and the memory that it takes
        wait(device)
        began, rounds = clock(), 0
        while rounds < FEWEST_ROUNDS or clock() - began < max_s:
            decode_batch(batch, encoded)
            wait(device)
            rounds += 1
        images_per_s = rounds * len(batch) / (clock() - began)
    return images_per_s / part.batch_size


def _decodes_images(dataset: Any) -> bool:
    return (
        type(dataset) is ImageDataset
        and isinstance(dataset.recipe, (TrainRecipe, EvalRecipe))
        and (dataset.cache is None or dataset.cache.kind == "bytes")
    )
