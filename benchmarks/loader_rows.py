"""The rows of `loader.py`: one file, cropped in processes and threads, by other libraries, and by ours."""

import io
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from loader_process import Feed, RunFacts
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import io as tv_io
from torchvision import transforms as v1
from torchvision.transforms import v2

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Box: TypeAlias = tuple[int, int, int, int]


def _random_box(height: int, width: int) -> Box:
    """The distribution of torchvision's RandomResizedCrop, without its tensors, which cost 60 us per image."""
    for _ in range(10):
        area = height * width * random.uniform(*SCALE)
        aspect = RATIO[0] * (RATIO[1] / RATIO[0]) ** random.random()
        rows, columns = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
        if 0 < rows <= height and 0 < columns <= width:
            return random.randint(0, height - rows), random.randint(0, width - columns), rows, columns
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


Crop: TypeAlias = Callable[[bytes], Tensor]
"""Encoded bytes -> uint8 (224, 224, 3), which stacks without being transposed."""


def opencv(data: bytes) -> Tensor:
    import cv2

    cv2.setNumThreads(0)
    image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    top, left, rows, columns = _random_box(*image.shape[:2])
    cut = image[top : top + rows, left : left + columns]
    image = cv2.resize(cut, (224, 224), interpolation=cv2.INTER_LINEAR)
    image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return torch.from_numpy(cv2.flip(image, 1) if random.random() < 0.5 else image)


def simplejpeg_v2(data: bytes) -> Tensor:
    import simplejpeg

    image = simplejpeg.decode_jpeg(data, "RGB")
    top, left, rows, columns = _random_box(*image.shape[:2])
    cut = np.ascontiguousarray(image[top : top + rows, left : left + columns])
    # As a batch of one, torchvision's resize stays in channels last, which is its fastest way.
    made: Tensor = v2.functional.resize(torch.from_numpy(cut)[None].permute(0, 3, 1, 2), [224, 224], antialias=True)
    if random.random() < 0.5:
        made = made.flip(-1)
    return made[0].permute(1, 2, 0)


def load_batch(paths: Sequence[Path], *, crop: Crop) -> Tensor:
    return torch.stack([crop(path.read_bytes()) for path in paths]).permute(0, 3, 1, 2)


# --- processes --------------------------------------------------------------------------------------------------------


class Files(Dataset[Any]):
    def __init__(self, files: list[Path], load: Callable[[Path], Any]) -> None:
        self.files, self.load = files, load

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.load(self.files[index])


def collate_channels_last(samples: list[Tensor]) -> Tensor:
    stacked: Tensor = default_collate(samples)  # right into shared memory
    return stacked.permute(0, 3, 1, 2)


def one_worker_thread(_: int) -> None:
    torch.set_num_threads(1)


def in_processes(job: RunFacts, dataset: Any, **options: Any) -> DataLoader[Any]:
    """A DataLoader as a careful user sets it up: workers that live on, two batches ahead in each."""
    options = {"batch_size": job.batch_size, "shuffle": True, **options}
    return DataLoader(
        dataset,
        num_workers=job.workers,
        persistent_workers=True,
        worker_init_fn=one_worker_thread,
        **options,
    )


def _read_crop(path: Path, crop: Crop) -> Tensor:
    return crop(path.read_bytes())


def dataloader(job: RunFacts, *, crop: Crop) -> Feed:
    loader = in_processes(job, Files(job.files, partial(_read_crop, crop=crop)), collate_fn=collate_channels_last)
    return Feed(lambda: loader)


class _Recipe:
    """A composed torchvision transform on what ``opened`` makes of a file."""

    def __init__(self, opened: Callable[[Path], Any], transform: Callable[[Any], Any]) -> None:
        self.opened, self.transform = opened, transform

    def __call__(self, path: Path) -> Any:
        return self.transform(self.opened(path))


def open_pillow(path: Path) -> Image.Image:
    return Image.open(io.BytesIO(path.read_bytes())).convert("RGB")


def pillow(job: RunFacts, *, floats: bool) -> Feed:
    """The recipe of torchvision's documentation; the reference, and the same without its float part."""
    last = [v1.ToTensor(), v1.Normalize(MEAN, STD)] if floats else [v1.PILToTensor()]
    recipe = v1.Compose([v1.RandomResizedCrop(job.size), v1.RandomHorizontalFlip(), *last])
    loader = in_processes(job, Files(job.files, _Recipe(open_pillow, recipe)))

    return Feed(lambda: loader)


def _open_torchvision(path: Path) -> Tensor:
    image: Tensor = tv_io.decode_image(str(path), tv_io.ImageReadMode.RGB)
    return image


def torchvision_v2(job: RunFacts) -> Feed:
    recipe = v2.Compose([v2.RandomResizedCrop(job.size, antialias=True), v2.RandomHorizontalFlip()])
    loader = in_processes(job, Files(job.files, _Recipe(_open_torchvision, recipe)))

    return Feed(lambda: loader)


# --- threads ----------------------------------------------------------------------------------------------------------


def thread_pool(job: RunFacts, *, crop: Crop) -> Feed:
    """A batch is one task; two more are ahead for each thread, as in a DataLoader."""
    batches = job.batches
    pool = ThreadPoolExecutor(job.workers)

    def epoch() -> Iterator[Tensor]:
        ahead: deque[Future[Tensor]] = deque()
        for batch in batches:
            ahead.append(pool.submit(load_batch, batch, crop=crop))
            if len(ahead) > 2 * job.workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    return Feed(epoch)


# --- other libraries --------------------------------------------------------------------------------------------------


def dali(job: RunFacts, *, antialias: bool) -> Feed:
    """DALI on the CPU: a decode of the random box alone, a triangular or linear resize, a flip.

    It is told how many batches to prepare. With ``run()`` the first two of an epoch are prepared before it starts.
    """
    import nvidia.dali

    fn: Any = nvidia.dali.fn
    types: Any = nvidia.dali.types
    kind = types.INTERP_TRIANGULAR if antialias else types.INTERP_LINEAR
    size = [job.size, job.size]

    def graph() -> Any:
        encoded, _ = fn.readers.file(file_root=str(job.folder / "train"), random_shuffle=True)
        images = fn.decoders.image_random_crop(encoded, device="cpu", output_type=types.RGB)
        images = fn.resize(images, size=size, interp_type=kind, antialias=antialias)
        return fn.flip(images, horizontal=fn.random.coin_flip())

    pipeline_of: Any = nvidia.dali.pipeline_def(
        batch_size=job.batch_size, num_threads=job.workers, device_id=None, prefetch_queue_depth=2
    )
    pipeline = pipeline_of(graph)()
    pipeline.build()
    total, first = len(job.files), True

    def epoch() -> Iterator[Tensor]:
        nonlocal first
        starts = range(0, total, job.batch_size)
        for _ in starts[: 1 if first else 2]:
            pipeline.schedule_run()  # the very first fills the queue of two
        first = False
        for number, at in enumerate(starts):
            (images,) = pipeline.share_outputs()
            # A copy, since the buffer is used again. The reader goes on with the next epoch inside the last batch.
            batch = torch.from_numpy(np.array(images.as_array())).permute(0, 3, 1, 2)[: total - at]
            pipeline.release_outputs()
            if number + 2 < len(starts):
                pipeline.schedule_run()
            yield batch

    return Feed(epoch)


def spdl(job: RunFacts, *, crop: Crop) -> Feed:
    """SPDL's pipeline with two threads, and the decoder that is its fastest here."""
    from spdl.pipeline import PipelineBuilder

    def epoch() -> Iterator[Tensor]:
        load = partial(load_batch, crop=crop)
        builder = PipelineBuilder().add_source(job.batches).pipe(load, concurrency=job.workers).add_sink(4)
        pipeline = builder.build(num_threads=job.workers)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return Feed(epoch)


def litdata(job: RunFacts, *, crop: Crop) -> Feed:
    """LitData's chunks and loader."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import Cache

    chunks = job.scratch / "litdata"
    if not chunks.exists():
        cache = Cache(str(chunks), chunk_bytes="64MB")
        for index, path in enumerate(job.files):
            cache[index] = {"image": path.read_bytes()}
        cache.done()
        cache.merge()

    loader = StreamingDataLoader(
        StreamingDataset(str(chunks), shuffle=True),
        batch_size=job.batch_size,
        num_workers=job.workers,
        collate_fn=_CropAll(crop),
        persistent_workers=True,
    )
    return Feed(lambda: loader)


class _CropAll:
    """Crops the samples of a batch, and puts them together."""

    def __init__(self, crop: Crop) -> None:
        self.crop = crop

    def __call__(self, samples: list[Any]) -> Tensor:
        return collate_channels_last([self.crop(bytes(sample["image"])) for sample in samples])


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(
    job: RunFacts,
    *,
    quality: Literal["exact", "fast"] = "exact",
    workers: Literal["process", "thread"] = "thread",
    hand_over: Literal["slots", "torch"] = "slots",
) -> Feed:
    """As a user gets it from ImageFolderDataModule."""
    from lightning_feed import ImageFolderDataModule, LoaderSettings

    settings = LoaderSettings(
        num_workers=job.workers, workers=workers, persistent_workers=True, pin_memory=False, hand_over=hand_over
    )
    made = ImageFolderDataModule(job.folder, job.batch_size, image_size=job.size, quality=quality, loader=settings)
    loader = made.train_dataloader()

    def epoch() -> Iterator[Any]:
        # No generator expression, which would call iter(loader), and with it start the workers, before the clock.
        for batch in loader:
            yield batch[0]

    return Feed(epoch)
