"""Which backend and which decoder an ImageFolderDataModule takes, on all ranks, and what they cannot do."""

import io
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from PIL import Image

from lightning_feed.archive.folder import SampleSource
from lightning_feed.decode.choose import Choice, make_decoder
from lightning_feed.errors import DatasetError, DecodeError, FeedError, LoaderError, MissingExtraError, SettingsError
from lightning_feed.load.backend_choice import BackendChoice, BackendFacts, choose_backend
from lightning_feed.load.dali.install import require_dali
from lightning_feed.load.image_findings import ImageFinding, ImageFindings, key_of_images
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.transfer.gpu_decode import nvjpeg

logger = logging.getLogger(__name__)

Chosen = TypeVar("Chosen")
Backend: TypeAlias = Literal["torch", "nvjpeg", "dali-cpu", "dali-gpu", "auto"]
BACKENDS: tuple[str, ...] = get_args(Backend)
_SAMPLES_TO_CHOOSE_BY = 64


def check_backend(backend: str, *, cache: str | None, transforms: bool, collate: bool, drop_keys: bool) -> None:
    """Refuse a backend that is none, and what it cannot be combined with.

    Raises:
        SettingsError: with what to do instead.
    """
    if backend not in BACKENDS:
        raise SettingsError(f"backend={backend!r} is not a choice. Give one of {', '.join(map(repr, BACKENDS))}.")
    if backend in ("torch", "auto"):
        return
    if transforms:
        raise SettingsError(
            f"backend={backend!r} crops and flips by itself, and cannot call a transform of yours for each image. "
            'Leave transform and eval_transform out, or use backend="torch".'
        )
    if collate:
        raise SettingsError(
            f"backend={backend!r} puts batches together before they are decoded, and cannot call a collate of yours. "
            'Change the decoded batch in device_transform, or use backend="torch".'
        )
    if drop_keys:
        raise SettingsError(
            f"drop_keys has nothing to drop with backend={backend!r}, whose batches are images, labels. Leave it out."
        )
    if cache not in (None, "bytes"):
        raise SettingsError(
            f"cache={cache!r} keeps decoded images, and backend={backend!r} decodes after the cache. Use "
            'cache="bytes", or backend="torch".'
        )


def reading_settings(given: LoaderSettings | None) -> LoaderSettings:
    """How to load where workers only read files: in threads, unless the user says otherwise."""
    return replace(LoaderSettings(), workers="thread") if given is None else given


def require_cuda(backend: str, device: Any) -> None:
    """Refuse a GPU backend without a GPU.

    Raises:
        SettingsError: with what to use instead.
    """
    if device.type != "cuda":
        raise SettingsError(
            f'backend={backend!r} decodes on a CUDA device, and training runs on {device.type}. Use backend="torch", '
            '"dali-cpu", or "auto", which takes what there is.'
        )


def settle_backend(backend: str, device: Any) -> BackendChoice:
    """The backend that was asked for by name, on a device.

    Raises:
        SettingsError: for a GPU backend without a GPU.
    """
    if backend in ("nvjpeg", "dali-gpu"):
        require_cuda(backend, device)
    return BackendChoice(backend, f"backend={backend!r}, as asked for")


def settle_auto(
    device: torch.device, key: dict[str, Any], *, transforms: bool, cache: str | None, quality: str, pixels: bool
) -> BackendChoice:
    """The backend for ``backend="auto"``, of what was measured before and what is installed.

    Args:
        device: that trains.
        key: under which findings are kept: see :func:`finding_key`.
        transforms: whether the user gave one.
        cache: as given.
        quality: as given.
        pixels: whether the images are pixels already.
    """
    found = ImageFindings().load(key)
    on_gpu = device.type == "cuda"
    no_nvjpeg = no_dali = "it was not looked for"
    if _matters(found, on_gpu=on_gpu):  # DALI takes a second to import
        no_nvjpeg = why_no_nvjpeg(device) if on_gpu else f"training is on {device.type}"
        no_dali = why_no_dali(gpu=on_gpu)
    return choose_backend(
        BackendFacts(
            device_type=device.type,
            no_nvjpeg=no_nvjpeg,
            no_dali=no_dali,
            transforms=transforms,
            cache=cache,
            quality=quality,
            pixels=pixels,
            findings=found,
        )
    )


def foreign_dataset(made: Any, split: str) -> BackendChoice:
    """What ``backend="auto"`` takes where a subclass gives samples that no other backend knows how to decode."""
    return BackendChoice(
        "torch",
        f"make_dataset({split!r}) gave a {type(made).__name__}, and the other backends decode only the images that "
        "ImageFolderDataModule.make_dataset gives, or a Subset of them",
    )


def fastest_decoder(source: SampleSource, crops: bool) -> Choice:  # noqa: FBT001  # as a recipe has it
    """The decoder for ``decoder="auto"``: the fastest on some of the images, the reference where it cannot be told.

    Args:
        source: of the images.
        crops: whether training takes a part of each.
    """
    samples = _some_encoded(source)
    try:
        if not samples:
            raise DecodeError("there are no encoded images to time decoders on: a pack of pixels needs none")
        choice = make_decoder("auto", samples, regions=crops)
    except DecodeError as error:  # images that cannot be read are dealt with as on_error says, in their turn
        choice = replace(make_decoder("pillow"), reason=f'decoder="auto" took the reference: {error}')
    logger.info("decoder=%r: %s", choice.name, choice.reason)
    return choice


@dataclass(frozen=True)
class _Failure:
    """What the other ranks are sent where rank 0 could not decide."""

    kind: type[FeedError]
    said: str

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        if isinstance(error, FeedError):
            return cls(type(error), str(error))
        return cls(LoaderError, f"{type(error).__name__}: {error}")

    def error(self) -> FeedError:
        return self.kind(f"Rank 0, which decides for all ranks how images are decoded, failed: {self.said}")


def once_for_all_ranks(trainer: Any, decide: Callable[[], Chosen]) -> Chosen:
    """What rank 0 decides: what is remembered and installed may differ from node to node, and all must do the same.

    Raises:
        FeedError: on the other ranks, where ``decide`` raises on rank 0: of the same class, if it is one of ours.
    """
    if trainer is None or trainer.world_size == 1:
        return decide()
    broadcast = trainer.strategy.broadcast
    if trainer.is_global_zero:
        try:
            chosen = decide()
        except Exception as error:
            broadcast(_Failure.of(error))  # the others wait for something
            raise
        broadcast(chosen)
        return chosen
    sent: Chosen | _Failure = broadcast(None)
    if isinstance(sent, _Failure):
        raise sent.error()
    return sent


def device_of(trainer: Any) -> torch.device:
    """Where the batches go: the Trainer's device; without one, the first that a Trainer would take."""
    if trainer is not None:
        return trainer.strategy.root_device  # type: ignore[no-any-return]
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def holds_pixels(source: SampleSource) -> bool:
    """Whether the first image is pixels, in a pack, and not encoded."""
    try:
        data = source.read(0) if len(source) else None
    except DatasetError:  # met again, and dealt with as on_error says, when it is its turn
        return False
    return isinstance(data, np.ndarray) and data.ndim == 3


def finding_key(root: Any, device: torch.device, *, image_size: int, quality: str) -> dict[str, Any]:
    """Where findings about a folder are kept, for a device as it is called: they hold for no other model."""
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return key_of_images(Path(root), image_size=image_size, quality=quality, device=model)


def require_nvjpeg(device: torch.device) -> None:
    """Have nvJPEG decode a small JPEG on a CUDA device.

    Raises:
        MissingExtraError: this torchvision has no nvJPEG.
        LoaderError: it fails on the device.
    """
    try:
        _decode_small(device)
    except RuntimeError as error:
        raise LoaderError(
            f'backend="nvjpeg" cannot decode on {device}, which failed on a small JPEG: {_first_line(error)}. Look at '
            'the driver and at the CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
        ) from error


def why_no_nvjpeg(device: torch.device) -> str:
    """Why nvJPEG cannot be used on a CUDA device; "" where it can, as seen by decoding a small JPEG."""
    try:
        _decode_small(device)
    except (MissingExtraError, RuntimeError) as error:
        return _first_line(error)
    return ""


def _decode_small(device: torch.device) -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    nvjpeg(device)([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def why_no_dali(*, gpu: bool) -> str:
    """Why DALI cannot be used; "" where it can."""
    try:
        require_dali(gpu=gpu)
    except (MissingExtraError, SettingsError) as error:
        return str(error)
    return ""


def _matters(found: tuple[ImageFinding, ...], *, on_gpu: bool) -> bool:
    """Whether anything but torch may be chosen."""
    if not on_gpu:
        return any(one.backend == "dali-cpu" for one in found)
    return any(one.backend != "torch" or one.cpu_bound for one in found)


def _some_encoded(source: SampleSource) -> list[Any]:
    """Images spread over the source, to measure decoders with; none where it holds pixels."""
    step = max(1, len(source) // _SAMPLES_TO_CHOOSE_BY)
    found = []
    for index in range(0, len(source), step)[:_SAMPLES_TO_CHOOSE_BY]:
        try:
            data = source.read(index)
        except DatasetError:  # met again, and dealt with as on_error says, when it is its turn
            continue
        if isinstance(data, np.ndarray) and data.ndim == 3:
            return []
        found.append(data)
    return found
