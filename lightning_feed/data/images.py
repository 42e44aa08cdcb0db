"""ImageFolderDataModule: a ready-made data module for a folder or pack of images."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import Subset

from lightning_feed import _host
from lightning_feed.data.datamodule import FeedDataModule, check_whole
from lightning_feed.data.image_run import ImageRun, PassEnds, Recipes, device_of, local_ranks_of, once_for_all_ranks
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.extras import require
from lightning_feed.images import backends
from lightning_feed.images.backends import Backend, BackendChoice, check_choice
from lightning_feed.images.choose import DECODER_NAMES, DecoderChoice, make_decoder
from lightning_feed.images.cpu_share import CpuShare
from lightning_feed.images.crop import QUALITIES, EvalRecipe, Quality, Recipe, SquareRecipe, TrainRecipe, UserTransform
from lightning_feed.images.dali_binding import DaliOptions, decode_threads
from lightning_feed.images.dali_decoder import DaliImageDecoder, PipelineSpec
from lightning_feed.images.decode_ahead import NvJpegDecoder, NvJpegOptions, fixed_share
from lightning_feed.images.decoders import Decoder
from lightning_feed.images.image_dataset import ImageDataset, collate_encoded, collate_images
from lightning_feed.images.ragged_crop import normalization_of
from lightning_feed.load.collate import BadSamples, OnError
from lightning_feed.load.kinds import Batch
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.load.stage import BatchDecoder
from lightning_feed.machine import limits
from lightning_feed.measure.measurements import DataModuleFacts
from lightning_feed.storage.folder import SampleSource
from lightning_feed.storage.splits import Splits
from lightning_feed.transfer.device_augment import crop_and_flip, draw_boxes

logger = logging.getLogger(__name__)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training images in [0, 1], RGB, as torchvision's pretrained weights expect
(torchvision documentation)."""
Channels: TypeAlias = Sequence[float]
"""A number for each of the channels R, G and B."""


class FeedImageFolder(FeedDataModule):
    """ImageFolderDataModule without its base class, which depends on the Lightning package."""

    _feed_without_validation = "set val_fraction=0 to train on all images of a folder without splits"

    def __init__(  # noqa: PLR0913 - each is a decision of the user's, all but the first have a default
        self,
        root: str | Path,
        batch_size: int = 32,
        *,
        eval_batch_size: int | Literal["even"] | None = None,
        image_size: int = 224,
        quality: Quality = "exact",
        backend: Backend | DaliOptions | NvJpegOptions = "torch",
        transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        decoder: str = "auto",
        val_fraction: float = 0.1,
        normalize: tuple[Channels, Channels] = (IMAGENET_MEAN, IMAGENET_STD),
        dtype: torch.dtype = torch.float32,
        on_error: OnError = "raise",
        max_failures: int = 100,
        loader: LoaderSettings | None = None,
        **storage: Any,
    ) -> None:
        name, options = backends.resolve(backend)
        if loader is None and name in backends.DALI_BACKENDS:
            loader = LoaderSettings(workers="thread")  # workers only read, for which threads are enough
        super().__init__(batch_size, eval_batch_size=eval_batch_size, loader=loader, data_dir=root, **storage)
        check_choice("quality", quality, QUALITIES)
        check_choice("decoder", decoder, DECODER_NAMES)
        if quality == "fast":
            require("cv2", extra="images", why='quality="fast"')
        check_whole("image_size", image_size, "pixels")
        self.image_size = image_size
        self.mean, self.std = _channels(normalize)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise SettingsError(
                f"dtype={dtype!r} cannot hold normalised images. Use torch.float32, bfloat16 or float16."
            )
        self.dtype = dtype
        self.decoder = decoder
        self.quality = quality
        self.backend = name
        self.on_error = on_error
        self.max_failures = max_failures
        short_side = round(image_size * 256 / 224)  # as in torchvision's reference evaluation
        train: Recipe = TrainRecipe(size=image_size, quality=quality)
        if transform is not None:
            train = UserTransform(transform)
        evaluation: Recipe = EvalRecipe(size=image_size, short_side=short_side, quality=quality)
        if eval_transform is not None:
            evaluation = UserTransform(eval_transform)
        self._images_recipes = Recipes(train=train, evaluation=evaluation, on_device=SquareRecipe(size=short_side))
        BadSamples(on_error, max_failures)  # refuses invalid values early
        if self._feed.loaders.on_device and transform is not None:
            raise SettingsError(
                "on_device=True keeps decoded images on the device, so a transform cannot run on the host. Leave "
                "transform out (crop and flip are then done on the device), or leave on_device out."
            )
        backends.check_backend(self.backend, quality, self._images_only_torch())
        self._images_splits = Splits(val_fraction)
        self._images_run = ImageRun(options)

    # --- what FastDataModule asks for ---------------------------------------------------------------------------------

    def make_dataset(self, split: str) -> ImageDataset | None:
        """Make a split's dataset from the folder of that name in ``root``, or from its share of ``root``."""
        source = self._images_source(split)
        if source is None:
            return None
        choice = self._images_run.decoder
        if choice is None:
            raise DatasetError(f"Rank 0 finds no images for {split!r}, but another rank does. All need the same data.")
        backend = self._images_choose_backend(source, choice.decoder)
        recipe, kept = self._images_recipes.of(split)
        return ImageDataset(
            source,
            choice.decoder,
            recipe,
            kept=kept,
            bad_samples=BadSamples(self.on_error, self.max_failures),
            encoded=backend != "torch",
            cpu_part=CpuShare() if backend == "nvjpeg" else None,
        )

    def collate(self, samples: list[Any], split: str) -> Any:
        """Make a batch (images, labels) in a worker. Images stay uint8 and channels last, encoded images encoded."""
        if self._images_choose_backend() == "torch":
            return collate_images(samples)
        return collate_encoded(samples)

    def device_transform(self, batch: Batch, split: str) -> Any:
        """Normalise uint8 images to ``dtype``. Images made float by a user's transform stay unchanged."""
        images, labels, *aspects = batch
        # On the CPU, as after a fit on a GPU, they are uint8.
        if self._images_run.backend_name in backends.GPU_BACKENDS and images.is_floating_point():
            return images.to(self.dtype), labels  # normalised already; DALI knows no bfloat16
        if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8:
            return batch
        if aspects:  # images kept on the device are whole, stretched to squares
            rank = 0 if self.trainer is None else self.trainer.global_rank
            run_seed = self._feed_run_seed()
            generator = self._images_run.generator(images.device, self._feed_epoch(), run_seed=run_seed, rank=rank)
            boxes = draw_boxes(aspects[0], generator=generator)
            flipped = torch.rand(len(images), generator=generator, device=images.device) < 0.5
            images = crop_and_flip(images, boxes, flipped, self.image_size)
        normalization = normalization_of(self.mean, self.std, self.dtype, images.device)
        return normalization(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), labels

    # --- to ask -------------------------------------------------------------------------------------------------------

    @property
    def classes(self) -> tuple[str, ...]:
        """Sorted class names: label 0 is ``classes[0]``."""
        return self._images_splits.classes(self.staged_dir)

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.classes)

    def _feed_facts(self) -> DataModuleFacts:
        decoder = self.decoder_choice
        return replace(
            super()._feed_facts(),
            decoder=None if decoder is None else decoder.name,
            quality=self.quality,
            backend=self._images_run.backend_name,
            normalizes=self._images_normalize and not self._feed_has_transfer_hooks(),
            own_transforms=any(name != "on_device" for name in self._images_only_torch()),
        )

    @property
    def _images_normalize(self) -> bool:
        """False for a user's device_transform, which sees the same batches with every backend."""
        return type(self).device_transform is FeedImageFolder.device_transform

    @property
    def backend_choice(self) -> BackendChoice | None:
        """The backend in use, with the reason. None until the first dataset is made."""
        return self._images_run.backend

    @property
    def decoder_choice(self) -> DecoderChoice | None:
        """The decoder in use, with the reason. None until the first dataset is made."""
        return self._images_run.decoder

    def failures(self) -> int:
        """Return the number of unreadable samples so far, over all splits, on this rank."""
        datasets = [_images_in(datasets.structure) for datasets in self._feed.datasets.values()]
        return sum(dataset.bad_samples.failures for dataset in datasets if dataset is not None)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_images_run": self._images_run.copy()}

    # --- details ------------------------------------------------------------------------------------------------------

    def _feed_decode(self, split: str) -> BatchDecoder | None:
        backend = self._images_choose_backend()
        trainer = self.trainer
        options = self._images_run.options
        if backend == "torch":
            return None
        images = _encoded_images(self._feed_datasets(split).structure, split)
        device = device_of(trainer)
        if isinstance(options, DaliOptions):
            return self._images_dali_decoder(split, images, device, options)
        if trainer is not None and device.type in limits.DECODING_BACKENDS:  # CUDA does not survive a later fork
            backends.require_nvjpeg(device)
            if self.backend != "auto":
                backends.tell_if_on_cores(device)
        return NvJpegDecoder(
            images,
            device,
            partial(normalization_of, self.mean, self.std, self.dtype, device) if self._images_normalize else None,
            cast("CpuShare", images.cpu_part),
            fixed_share(options),
        )

    def _feed_attach(self) -> None:
        super()._feed_attach()
        if self.trainer is None or not isinstance(self._images_run.options, DaliOptions):
            return
        callbacks = _host.callbacks_of(self.trainer)
        if not any(isinstance(callback, PassEnds) and callback.datamodule is self for callback in callbacks):
            callbacks.append(PassEnds(self))

    def _feed_pass_ended(self, split: str) -> None:
        """Release the split's DALI pipeline at the end of a pass, unless the options keep it."""
        decoder = self._images_run.pipelines.get(split)
        if decoder is not None and not decoder.spec.options.keep_eval_pipelines:
            decoder.release()

    def _feed_release(self) -> None:
        """Free the loaders' resources after the Trainer has finished."""
        for decoder in self._images_run.pipelines.values():
            decoder.release()  # a reused loader builds a new pipeline

    def _images_dali_decoder(
        self, split: str, images: ImageDataset, device: torch.device, options: DaliOptions
    ) -> DaliImageDecoder:
        """Make a DALI decoder for the batches of a split. Frees the previous decoder."""
        pipelines = self._images_run.pipelines
        if split in pipelines:
            pipelines[split].release()
        threads, reason = decode_threads(options, limits.read_machine(), local_ranks_of(self.trainer))
        if not pipelines:
            logger.info("DALI decodes with %d CPU threads for each pipeline: %s", threads, reason)
        can_decode = device.type in limits.DECODING_BACKENDS
        pin = can_decode and self._feed.loaders.settings.pin_memory is not False
        spec = PipelineSpec(
            batch_size=1,
            device=device if can_decode and options.device == "gpu" else torch.device("cpu"),
            threads=threads,
            options=options,
            mean=self.mean,
            std=self.std,
            half=self.dtype == torch.float16,
        )
        keep = split == "train" or options.keep_eval_pipelines
        pipelines[split] = DaliImageDecoder(images, spec, keep=keep, pin=pin)
        return pipelines[split]

    def _images_source(self, split: str) -> SampleSource | None:
        """Return the images of a split. The first call chooses the decoder, on rank 0 if all ranks must agree."""
        run = self._images_run
        scanned: list[SampleSource | None] = []  # a large folder takes seconds, so it is read once

        def scan() -> SampleSource | None:
            scanned.append(self._images_splits.source(self.staged_dir, split))
            return scanned[0]

        def choose() -> str | None:
            source = scan()
            if source is None:
                return None
            run.decoder = backends.choose_decoder(source, self._images_recipes.train.crops)
            return run.decoder.name

        name: str | None = self.decoder
        if run.decoder is None and name == "auto":
            name = once_for_all_ranks(self.trainer, choose)
        if run.decoder is None and name is not None:  # the user named it, or another rank chose it
            run.decoder = make_decoder(name)
        return scanned[0] if scanned else scan()

    def _images_choose_backend(self, source: SampleSource | None = None, decoder: Decoder | None = None) -> str:
        """Return the backend's name. The first call, when the device is known, checks or chooses it.

        Args:
            source: images to try for ``backend="auto"``, on rank 0.
            decoder: their decoder.
        """
        run = self._images_run
        if run.backend is None and self.backend == "auto":
            run.backend = once_for_all_ranks(self.trainer, lambda: self._images_try(source, decoder))
            logger.info("%s", run.backend.reason)
        if run.backend is None:
            backends.check_available(self.backend, device_of(self.trainer))
            reason = "the default" if self.backend == "torch" else "as asked for"
            run.backend = BackendChoice(self.backend, f"backend={self.backend!r}, {reason}")
        return run.backend.name

    def _images_try(self, source: SampleSource | None, decoder: Decoder | None) -> BackendChoice:
        """Choose the backend by trying."""
        asked = self._images_only_torch()
        if asked or source is None or decoder is None:
            return BackendChoice("torch", f'backend="auto": only backend="torch" has {", ".join(asked) or "no images"}')
        images = ImageDataset(source, decoder, self._images_recipes.train, encoded=True, cpu_part=CpuShare())
        cpus = max(1, limits.read_machine().usable_cpus // local_ranks_of(self.trainer))
        return backends.choose_backend(images, device_of(self.trainer), cpus)

    def _images_only_torch(self) -> tuple[str, ...]:
        """Return the requested features that only ``backend="torch"`` has."""
        asked = {
            "transform": self._images_recipes.has_transform,
            "collate": type(self).collate is not FeedImageFolder.collate,
            "drop_keys": bool(self._feed.loaders.drop_keys),
            "on_device": self._feed.loaders.on_device,
        }
        return tuple(name for name, there in asked.items() if there)


def _channels(normalize: tuple[Channels, Channels]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of ``normalize``, checked."""
    mean, std = normalize if len(normalize) == 2 else ((), ())
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise SettingsError(
            f"normalize={normalize!r}: give (mean, std), with three numbers each, for R, G and B, and std above 0."
        )
    return tuple(mean), tuple(std)


def _images_in(dataset: object) -> ImageDataset | None:
    """Return the image dataset itself, or the one inside a ``Subset``. None for other datasets.

    Other wrappers may change samples, so they need decoded images.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ImageDataset:
        return dataset
    return None


def _encoded_images(dataset: object, split: str) -> ImageDataset:
    """Return the still encoded images of a split, which may be inside a ``Subset``.

    Raises:
        SettingsError: the dataset is of another kind.
    """
    inner = _images_in(dataset)
    if inner is None or not inner.encoded:
        raise SettingsError(
            f"make_dataset({split!r}) returned a {type(dataset).__name__}, but this backend decodes only images "
            f"that ImageFolderDataModule reads. Return super().make_dataset({split!r}) or a Subset of it, or use "
            'backend="torch".'
        )
    return inner


class ImageFolderDataModule(FeedImageFolder, LightningDataModule):
    """A data module for images in class folders, or for a pack of them.

    ``root`` is a folder of ``train`` and ``val`` (and ``test``) folders with class folders in them; or a folder of
    class folders, where ``val_fraction`` of the images is set aside for validation; or a pack of either
    (``lightning-feed pack``). Batches are (images, labels). Images leave the workers as uint8 of shape (B, 3, H, W),
    channels last, which is a quarter of the bytes of float32. ``device_transform`` normalises them to ``dtype`` on the
    device.

    Args:
        root: the folder or the pack. With ``stage_to`` it may be an fsspec URL, such as ``"s3://bucket/birds"``.
        batch_size: samples in a training batch, on each rank.
        eval_batch_size: samples in a batch of validation and test, or ``"even"``, as for FastDataModule. By default
            ``batch_size``.
        image_size: height and width of the images, in pixels.
        quality: ``"exact"`` yields the pixels of torchvision's uint8 recipe. ``"fast"`` decodes at the smallest
            sufficient scale, and resizes without antialiasing (needs OpenCV). For the pixel differences see
            docs/how-to/images.md.
        transform: replaces RandomResizedCrop and flip for training images: torchvision v1 or v2, or a function.
        eval_transform: replaces Resize and CenterCrop for the other splits.
        decoder: a decoder's name, or ``"auto"`` for the fastest on this machine that matches Pillow (45 dB or more).
        val_fraction: share set aside for validation if ``root`` has no split folders.
        normalize: (mean, standard deviation) of the channels, for values in [0, 1]; three numbers each.
        dtype: type of the normalised images.
        on_error: for unreadable images, ``"raise"``, ``"skip"`` (repeats another image of the batch) or
            ``"substitute"`` (takes another image of the split). The last two count and log the unreadable images.
        max_failures: limit of unreadable images, for ``"skip"`` and ``"substitute"``.
        backend: how to decode: ``"torch"`` in the workers; ``"nvjpeg"`` on the GPU, with help of the workers;
            ``"auto"`` for the faster of these two on this machine; ``"dali-gpu"`` or ``"dali-cpu"``. Or
            ``NvJpegOptions(cpu_share=...)``, ``DaliOptions(device="gpu", ...)``.
        loader: settings of the loaders.
        **storage: ``stage_to``, ``on_device`` and ``drop_keys`` of FastDataModule.

    Raises:
        SettingsError: a value is invalid.

    Example:
        >>> from lightning_feed import ImageFolderDataModule
        >>> birds = ImageFolderDataModule("birds", batch_size=256, dtype=torch.bfloat16)
        >>> birds.dtype
        torch.bfloat16
    """
