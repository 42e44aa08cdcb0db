"""The DALI decoders of a data module's loaders, and the callback that frees them when their loop is over."""

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Subset

from lightning_feed.errors import SettingsError
from lightning_feed.load.dali.image_decoder import DaliImageDecoder
from lightning_feed.load.dali.image_pipeline import PipelineSpec
from lightning_feed.load.dali.options import DaliOptions, decode_threads
from lightning_feed.load.encoded_batch import EncodedImageDataset
from lightning_feed.load.image_dataset import ImageDataset
from lightning_feed.load.machine import read_machine

logger = logging.getLogger(__name__)


class ImageDecoders:
    """Makes a decoder for each split's loader, and frees them.

    Args:
        options: for all of them.
        mean: of R, G and B for values in [0, 1], where the decoder normalises.
        std: the same.
        half: whether normalised images are float16 there.
    """

    def __init__(
        self, options: DaliOptions, mean: tuple[float, ...], std: tuple[float, ...], *, half: bool = False
    ) -> None:
        self.options = options
        self.mean, self.std, self.half = mean, std, half
        self._of_split: dict[str, DaliImageDecoder] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of_split": {}}  # they are made with the loaders, in the process that uses them

    def make(
        self, split: str, images: EncodedImageDataset, device: torch.device, *, local_ranks: int = 1, pin: bool = False
    ) -> DaliImageDecoder:
        """The decoder for the loader of a split; one that was made for it before is freed.

        Args:
            split: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
            images: of the split.
            device: that it decodes on.
            local_ranks: training processes on this machine.
            pin: whether batches in host memory are to lie in page-locked memory.
        """
        self.release(split)
        threads, reason = decode_threads(self.options, read_machine(), local_ranks, gpu=device.type == "cuda")
        if not self._of_split:
            logger.info("DALI decodes with %d CPU threads for each pipeline: %s", threads, reason)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        spec = PipelineSpec(
            batch_size=1,
            device=device,
            threads=threads,
            prefetch=self.options.prefetch,
            mean=self.mean,
            std=self.std,
            half=self.half,
            largest_image=self.options.largest_image,
            hw_decoder_load=self.options.hw_decoder_load,
        )
        keep = split == "train" or self.options.keep_eval_pipelines
        made = self._of_split[split] = DaliImageDecoder(images, spec, keep=keep, pin=pin)
        return made

    def active(self) -> tuple[str, ...]:
        """The splits that have a pipeline now, sorted."""
        return tuple(sorted(split for split, decoder in self._of_split.items() if decoder.active))

    def release(self, *splits: str) -> None:
        """Free the pipelines of these splits; of all without any. Loaders build another when they need it."""
        for split in splits or tuple(self._of_split):
            if split in self._of_split:
                self._of_split[split].release()

    def attach(self, trainer: Any) -> None:
        """Have a Trainer free them. To be called while it sets up."""
        if not any(isinstance(each, FreesDecoders) and each.decoders is self for each in trainer.callbacks):
            trainer.callbacks.append(FreesDecoders(self))


class FreesDecoders(Callback):
    """Frees the pipelines of evaluation when it is over, and all of them when the Trainer is done.

    A loop that ends early, as with ``limit_val_batches``, does not close its loader: only the hooks tell.
    """

    def __init__(self, decoders: ImageDecoders) -> None:
        self.decoders = decoders

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also at the end of the sanity check, and of each validation inside a fit."""
        self._end_of("val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Free what the test used."""
        self._end_of("test")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Free what the prediction used."""
        self._end_of("predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Free all."""
        self.decoders.release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Free all after an error, too: Lightning does not call ``teardown`` then."""
        self.decoders.release()

    def _end_of(self, split: str) -> None:
        if not self.decoders.options.keep_eval_pipelines:
            self.decoders.release(split)


def images_in(dataset: Any) -> ImageDataset | None:
    """The images that are all there is in a dataset: itself, or what a ``Subset`` is of; None for all others.

    Another wrapper may do anything to a sample, and has to get it decoded.
    """
    inner = dataset
    while isinstance(inner, Subset) and _only_picks(type(inner)):
        inner = inner.dataset
    return inner if type(inner) in (ImageDataset, EncodedImageDataset) else None


def encoded_images(dataset: Any, split: str) -> EncodedImageDataset:
    """The images of a split, out of a ``Subset`` of them if need be.

    Raises:
        SettingsError: for a dataset of another kind.
    """
    inner = images_in(dataset)
    if not isinstance(inner, EncodedImageDataset):
        raise SettingsError(
            f"make_dataset({split!r}) gave a {type(dataset).__name__}, and this backend decodes the images "
            f"that ImageFolderDataModule reads. Return super().make_dataset({split!r}) or a Subset of it, or use "
            'backend="torch" or "auto".'
        )
    return inner


def switch_decoding(images: ImageDataset, *, encoded: bool) -> None:
    """Have the samples come encoded or decoded from now on. In place: a Subset, or the user, may hold the dataset."""
    images.__class__ = EncodedImageDataset if encoded else ImageDataset


def _only_picks(kind: type[Subset[Any]]) -> bool:
    """Whether a Subset gives the samples as they are."""
    return all(getattr(kind, name) is getattr(Subset, name) for name in ("__getitem__", "__getitems__"))
