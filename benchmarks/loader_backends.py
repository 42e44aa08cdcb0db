"""The rows of `loader.py --backend`: ImageFolderDataModule with each of its image backends, two threads or workers.

A backend whose work is the GPU's has, on a machine without one, the row of what stays with the host: files read,
headers parsed, boxes drawn, batches put together. How its pixels are made there says nothing about the GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from loader_ours import middle_recipe, ours
from loader_peers import dali
from loader_process import Feed, Job, Skip

BASE = "backend torch, t2"
"""What the ratios are to."""


def backend_rows() -> dict[str, dict[str, Callable[[Job], Feed]]]:
    """By backend: what each row is called, and what makes it."""
    return {
        "torch": {
            BASE: ours,
            "backend torch, w2": partial(ours, workers="process"),
            "backend torch + device_transform on the CPU, t2": partial(ours, floats=True),
        },
        "dali-cpu": {
            "backend dali-cpu, t1, 2 DALI threads": on_dali,
            "backend dali-cpu, w1, 2 DALI threads": partial(on_dali, workers="process"),
            "backend dali-cpu + device_transform on the CPU, t1, 2 DALI threads": partial(on_dali, floats=True),
            "DALI CPU with its own reader, 2 DALI threads": partial(dali, antialias=True),
        },
        "nvjpeg": {
            "backend nvjpeg, t2": partial(on_gpu, backend="nvjpeg"),
            "backend nvjpeg, what stays with the host, t2": host_part,
        },
        "dali-gpu": {"backend dali-gpu, t2": partial(on_gpu, backend="dali-gpu")},
    }


def on_dali(job: Job, *, workers: Literal["process", "thread"] = "thread", floats: bool = False) -> Feed:
    """Decoded by DALI on the CPU. One worker reads, since DALI's threads take the CPUs.

    With ``floats`` also ``device_transform`` runs there, as it does where there is no device.
    """
    from lightning_feed import ImageFolderDataModule, LoaderSettings
    from lightning_feed.decode.choose import make_decoder
    from lightning_feed.images.dali_binding import DaliOptions, require_dali
    from lightning_feed.images.dali_decoder import ImagePipeline, PipelineSpec

    require_dali(gpu=False)
    made = ImageFolderDataModule(
        job.folder,
        job.batch_size,
        image_size=job.size,
        backend="dali-cpu",
        dali=DaliOptions(threads=job.workers),
        loader=LoaderSettings(num_workers=1, workers=workers, persistent_workers=True, pin_memory=False),
    )
    loader = made.train_dataloader()

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield (made.device_transform(batch, "train") if floats else batch)[0]

    def pixels(paths: Sequence[Path]) -> Iterable[np.ndarray]:
        spec = PipelineSpec(
            batch_size=1,
            device=torch.device("cpu"),
            threads=1,
            options=DaliOptions(prefetch=1),
            mean=made.mean,
            std=made.std,
            half=False,
        )
        pipeline, size_of, recipe = ImagePipeline(spec), make_decoder("pillow").decoder.size, middle_recipe(job.size)
        for path in paths:
            data = path.read_bytes()
            pipeline.feed([data], [recipe.spec(*size_of(data))])
            yield np.array(pipeline.take()[0].permute(1, 2, 0))
        pipeline.close()

    return Feed(epoch, pixels)


def on_gpu(job: Job, *, backend: str) -> Feed:
    """Decoded on the GPU, on the stream that a step would run on: without a step beside it."""
    from lightning.fabric.utilities import move_data_to_device

    from lightning_feed import ImageFolderDataModule, LoaderSettings

    if not torch.cuda.is_available():
        raise Skip("no GPU")
    made = ImageFolderDataModule(
        job.folder,
        job.batch_size,
        image_size=job.size,
        backend=backend,
        loader=LoaderSettings(num_workers=job.workers, workers="thread"),
    )
    loader, device = made.train_dataloader(), torch.device("cuda", 0)

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield made.device_transform(move_data_to_device(batch, device), "train")[0]
        torch.cuda.synchronize()

    return Feed(epoch)


def host_part(job: Job) -> Feed:
    """What the workers do of backend="nvjpeg", up to a batch of encoded images."""
    from lightning_feed import ImageFolderDataModule, LoaderSettings
    from lightning_feed.data import image_backends

    made = ImageFolderDataModule(
        job.folder,
        job.batch_size,
        image_size=job.size,
        backend="nvjpeg",
        loader=LoaderSettings(num_workers=job.workers, workers="thread", persistent_workers=True, pin_memory=False),
    )
    with mock.patch.object(image_backends, "GPU_BACKENDS", ()):
        loader = made.train_dataloader()
    place = torch.empty(1)

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield place.expand(len(batch), 3, job.size, job.size)  # of the shape that it will have; no memory

    return Feed(epoch)
