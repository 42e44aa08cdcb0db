"""The rows of `loader.py` that are other libraries."""

import io
import random
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_process import Feed, Job
from loader_recipes import RANDOM, Crop, collate_channels_last, in_processes, load_batch, pixels_of
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


def dali(job: Job, *, antialias: bool) -> Feed:
    """DALI on the CPU: a decode of the random box alone, a triangular or linear resize, a flip.

    It is told how many batches to prepare. With ``run()`` the first two of an epoch are prepared before it starts.
    """
    from nvidia.dali import fn, math, pipeline_def, types

    kind = types.INTERP_TRIANGULAR if antialias else types.INTERP_LINEAR
    size = [job.size, job.size]

    @pipeline_def(batch_size=job.batch_size, num_threads=job.workers, device_id=None, prefetch_queue_depth=2)
    def graph() -> Any:
        encoded, _ = fn.readers.file(file_root=str(job.folder / "train"), random_shuffle=True)
        images = fn.decoders.image_random_crop(encoded, device="cpu", output_type=types.RGB)
        images = fn.resize(images, size=size, interp_type=kind, antialias=antialias)
        return fn.flip(images, horizontal=fn.random.coin_flip())

    @pipeline_def(num_threads=1, device_id=None)
    def fixed(files: list[str]) -> Any:
        encoded, _ = fn.readers.file(files=files)
        shape = fn.peek_image_shape(encoded)
        side = fn.cast(math.min(shape[0], shape[1]), dtype=types.FLOAT)
        images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        images = fn.crop(images, crop_h=side, crop_w=side, rounding="truncate")
        return fn.resize(images, size=size, interp_type=kind, antialias=antialias)

    pipeline = graph()
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

    def pixels(paths: Sequence[Path]) -> Iterable[np.ndarray]:
        made = fixed([str(path) for path in paths], batch_size=len(paths))
        made.build()
        (images,) = made.run()
        return np.array(images.as_array())

    return Feed(epoch, pixels)


def spdl(job: Job, *, crop: Crop) -> Feed:
    """SPDL's pipeline with two threads, and the decoder that is its fastest here."""
    from spdl.pipeline import PipelineBuilder

    def epoch() -> Iterator[Tensor]:
        load = partial(load_batch, crop=crop)
        builder = PipelineBuilder().add_source(job.batches).pipe(load, concurrency=job.workers).add_sink(4)
        pipeline = builder.build(num_threads=job.workers)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return Feed(epoch, pixels_of(crop))


def torchdata_nodes(job: Job, *, crop: Crop) -> Feed:
    """torchdata's ParallelMapper with two threads."""
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    def epoch() -> Iterable[Tensor]:
        load = partial(load_batch, crop=crop)
        return Loader(ParallelMapper(IterableWrapper(job.batches), load, num_workers=job.workers, method="thread"))

    return Feed(epoch, pixels_of(crop))


def litdata(job: Job, *, crop: Crop) -> Feed:
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
    return Feed(lambda: loader, pixels_of(crop))


class _CropAll:
    """Crops the samples of a batch, and puts them together."""

    def __init__(self, crop: Crop) -> None:
        self.crop = crop

    def __call__(self, samples: list[Any]) -> Tensor:
        return collate_channels_last([self.crop(bytes(sample["image"]), RANDOM) for sample in samples])


def webdataset(job: Job, *, crop: Crop) -> Feed:
    """WebDataset's tar files, one share for each worker."""
    import webdataset as wds

    shards = [str(path) for path in tars(job, 2 * job.workers)]
    dataset = wds.WebDataset(shards, shardshuffle=False).shuffle(500).to_tuple("jpg").map(_First(crop))
    loader = DataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.workers,
        collate_fn=collate_channels_last,
        persistent_workers=True,
    )
    return Feed(lambda: loader, pixels_of(crop))


class _First:
    """Crops what comes alone in a tuple."""

    def __init__(self, crop: Crop) -> None:
        self.crop = crop

    def __call__(self, sample: tuple[bytes]) -> Tensor:
        return self.crop(sample[0], RANDOM)


def lmdb(job: Job, *, crop: Crop) -> Feed:
    """LMDB as it is used by hand, in worker processes."""
    import lmdb as library

    place = job.scratch / "lmdb"
    if not place.exists():
        size = 2 * sum(path.stat().st_size for path in job.files) + (64 << 20)
        with library.open(str(place), map_size=size) as environment, environment.begin(write=True) as transaction:
            for index, path in enumerate(job.files):
                transaction.put(b"%08d" % index, path.read_bytes())
    loader = in_processes(job, _Lmdb(place, len(job.files), crop), collate_fn=collate_channels_last)
    return Feed(lambda: loader, pixels_of(crop))


class _Lmdb(Dataset[Tensor]):
    def __init__(self, place: Path, size: int, crop: Crop) -> None:
        self.place, self.size, self.crop = place, size, crop
        self.environment: Any = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        if self.environment is None:
            import lmdb as library

            self.environment = library.open(str(self.place), readonly=True, lock=False, readahead=False)
        with self.environment.begin() as transaction:
            return self.crop(transaction.get(b"%08d" % index), RANDOM)


def turboloader(job: Job) -> Feed:
    """TurboLoader's C++ threads: its own region decode, antialiased resize and flip, float32 as it comes."""
    import turboloader as library

    (tar,) = tars(job, 1)
    loader = library.DataLoader(
        str(tar),
        batch_size=job.batch_size,
        num_workers=job.workers,
        shuffle=True,
        image_size=job.size,
        train_aug=True,
        antialias=True,
        output_format="pytorch",
    )

    def epoch() -> Iterator[Tensor]:
        for batch in loader:
            yield batch["image"] if isinstance(batch, dict) else batch[0]

    def pixels(paths: Sequence[Path]) -> Iterable[np.ndarray]:
        """Without ``train_aug``, which has no fixed box: the whole image, by the same resize."""
        archive = job.scratch / "some.tar"
        with tarfile.open(archive, "w") as writer:
            for number, path in enumerate(paths):
                writer.add(path.resolve(), f"{number:07}.jpg")
        how = {"image_size": job.size, "antialias": True, "output_format": "pytorch"}
        ((images, about),) = library.DataLoader(str(archive), batch_size=len(paths), num_workers=job.workers, **how)
        in_order = np.asarray(images)[np.argsort(about["indices"])]
        return (in_order * 255).round().transpose(0, 2, 3, 1)

    return Feed(epoch, pixels, whole=True)


def ffcv(job: Job) -> Feed:
    """FFCV with JPEGs re-encoded into its own file, by its writer's default quality; area resize."""
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    beton = job.scratch / "images.beton"
    if not beton.exists():
        writer = DatasetWriter(str(beton), {"image": RGBImageField(write_mode="jpg")}, num_workers=1)
        writer.from_indexed_dataset(_Pictures(job.files))
    steps = [
        RandomResizedCropRGBImageDecoder((job.size, job.size)),
        RandomHorizontalFlip(),
        ToTensor(),
        ToTorchImage(),
    ]
    loader = Loader(
        str(beton),
        batch_size=job.batch_size,
        num_workers=job.workers,
        order=OrderOption.RANDOM,
        drop_last=False,
        pipelines={"image": steps},
    )

    def epoch() -> Iterator[Tensor]:
        # No generator expression, which would call iter(loader), and with it start the threads, before the clock.
        for (images,) in loader:
            yield images

    def pixels(paths: Sequence[Path]) -> Iterable[np.ndarray]:
        """What encoding again changed is in it, too."""
        some = str(job.scratch / "some.beton")
        DatasetWriter(some, {"image": RGBImageField(write_mode="jpg")}, num_workers=1).from_indexed_dataset(
            _Pictures(list(paths))
        )
        steps = [CenterCropRGBImageDecoder((job.size, job.size), ratio=1), ToTensor(), ToTorchImage()]
        for (images,) in Loader(some, batch_size=len(paths), num_workers=1, pipelines={"image": steps}):
            yield from images.permute(0, 2, 3, 1).numpy()

    return Feed(epoch, pixels)


class _Pictures(Dataset[Any]):
    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        return (Image.open(self.files[index]).convert("RGB"),)


def tars(job: Job, count: int) -> list[Path]:
    """The files as tar archives, in random order, divided evenly."""
    made = [job.scratch / f"images-{count}-{number}.tar" for number in range(count)]
    if not made[-1].exists():
        files = job.files
        random.Random(0).shuffle(files)
        for number, path in enumerate(made):
            with tarfile.open(path, "w") as archive:
                for place, file in enumerate(files[number::count]):
                    data = file.read_bytes()
                    entry = tarfile.TarInfo(f"{place:07}.jpg")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    return made
