"""Experiment: the samples of an ImageFolderDataModule, made with changes that may give each of them less work."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Subset

from lightning_feed.diagnosing.failures import in_a_line
from lightning_feed.diagnosing.parts import SILENT_S, NotMeasurable, naming, not_hanging, threads_of_a_worker
from lightning_feed.diagnosing.samples import MOST_SAMPLES, StepTimer, innermost
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import DatasetError, FeedError
from lightning_feed.extras import require
from lightning_feed.images.backends import check_backend, decoding_ms, require_nvjpeg
from lightning_feed.images.choose import DECODER_NAMES, make_decoder
from lightning_feed.images.cpu_share import CpuShare
from lightning_feed.images.crop import TrainRecipe, UserTransform, cropping_step
from lightning_feed.images.image_dataset import EncodedSample, ImageDataset, holds_pixels
from lightning_feed.load.kinds import AnyDataset
from lightning_feed.load.random_state import preserve_state
from lightning_feed.machine.file_system import find_room
from lightning_feed.machine.limits import MEMORY_SHARE
from lightning_feed.measure.experiment_results import LighterSample, PackedImages, pack_options
from lightning_feed.measure.facts import is_instance
from lightning_feed.storage.folder import Encoded, FolderSource, SampleSource
from lightning_feed.storage.packed_dataset import pixels_of
from lightning_feed.storage.packing import ImageChanges
from lightning_feed.storage.splits import Chosen
from lightning_feed.trials.loader_rate import Heartbeat
from lightning_feed.wording import size_text

_MOST_DECODED = 64
"""Largest number of images that are decoded on the device."""
_OWN = "as configured"
_LARGER = 256 / 224
"""Shorter side of a stored image, divided by the side of the crops: as in torchvision's reference evaluation."""


# --- what a change is ---------------------------------------------------------------------------------------------


class _Stored:
    """A SampleSource that holds one sample, as a pack would hold it.

    Attributes:
        changes: the changes that the pack makes to images.
        total_bytes: bytes of all samples that were held so far.
        resized: True once an image was made smaller.
    """

    def __init__(self, source: SampleSource, changes: ImageChanges) -> None:
        self.classes = source.classes
        self.labels = source.labels
        self.name = source.name
        self.changes = changes
        self.total_bytes = 0
        self.resized = False
        self._sample = b""

    def __len__(self) -> int:
        return len(self.labels)

    def store(self, data: bytes) -> None:
        """Hold the image with these bytes, in place of the image before it.

        Raises:
            DecodeError: the image cannot be read.
        """
        self._sample = self.changes.apply(data)
        self.total_bytes += len(self._sample)
        if not self.changes.decoded:
            self.resized = self.resized or self._sample is not data
        elif self.changes.short_side is not None:
            self.resized = self.resized or min(pixels_of(self._sample).shape[:2]) == self.changes.short_side

    def read(self, _index: int) -> Encoded:
        """Return the sample that is held."""
        if self.changes.decoded:
            return pixels_of(self._sample)
        return self._sample


@dataclass(frozen=True, eq=False, kw_only=True)
class _Change:
    """A change, and the samples made with it."""

    setting: Literal["decoder", "backend", "quality", "root"]
    value: str
    """The new value of the setting, as in :class:`LighterSample`."""
    code: str
    """Name of the change in the list of experiments that were left out."""
    dataset: ImageDataset
    stored: _Stored | None = None
    """The source of ``dataset``, if the change is a pack."""


# --- the experiment -----------------------------------------------------------------------------------------------


def measure_lighter_samples(session: Session) -> None:
    """Measure the CPU time of an ImageFolderDataModule's samples with changes that may give each sample less work.

    Each sample is made as configured and with each change in turn, with the same random numbers, so that other programs
    slow all of them down alike. A change that cannot be tried is left out, with the reason. Images that cannot be read
    are left out, too. Does nothing for other data modules, nor if another backend decodes.

    Raises:
        NotMeasurable: too few images can be read.
        DatasetError: a readable image gives no sample as configured.
        LoaderError: a sample takes very long.
    """
    images = _images_of(session)
    if images is None:
        return
    trial = _Trial(session, images)
    with preserve_state(trial.part.loader), threads_of_a_worker(trial.part):
        trial.find_changes()
        if not trial.changes:
            return
        not_hanging(trial.make, SILENT_S, "A sample of the images")
    if not trial.count:
        raise NotMeasurable("too few of the first images can be read")
    session.note(lighter=tuple(trial.results()))


def _images_of(session: Session) -> ImageDataset | None:
    """Return the images of an ImageFolderDataModule that its workers decode; None for any other loaders."""
    ours = is_instance(session.datamodule, "lightning_feed.data.images", "FeedImageFolder")
    if not ours or session.loaders is not None or len(session.parts) != 1:
        return None
    dataset: AnyDataset = session.parts[0].loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ImageDataset and not dataset.encoded:
        return dataset
    return None


class _Trial:
    """The samples of an ImageFolderDataModule, made as configured and with each change.

    Attributes:
        session: the session, which gets the reasons why changes are left out.
        part: the training loader.
        changes: the changes that have not failed.
        count: number of samples that were timed in each way.
    """

    def __init__(self, session: Session, images: ImageDataset) -> None:
        self.session = session
        self.part = session.parts[0]
        self.changes: list[_Change] = []
        self.count = 0
        self._images = images
        self._own = self._twin()
        self._timer = StepTimer()
        self._read = 0
        self._read_bytes = 0
        self._encoded: list[EncodedSample] = []

    def _twin(self, source: SampleSource | None = None, **changed: Any) -> ImageDataset:
        """Return the images with another source, decoder or recipe. An image that cannot be read always raises an
        error."""
        parts = {"decoder": self._images.decoder, "recipe": self._images.recipe, **changed}
        return ImageDataset(source or self._images.source, **parts)

    def _leave_out(self, code: str, why: object) -> None:
        self.changes = [change for change in self.changes if change.code != code]
        self.session.leave_out(code, str(why))

    # --- the changes ----------------------------------------------------------------------------------------------

    def find_changes(self) -> None:
        """Find the changes that exist for this data module on this machine."""
        is_packed = not isinstance(_unchosen(self._images.source), FolderSource)
        self._find('quality="fast"', self._fast)
        if is_packed and holds_pixels(self._images.read(0)):
            return
        self._find_decoders()
        if self.session.device.type == "cuda":
            self._find('backend="nvjpeg"', self._nvjpeg)
        if not is_packed:
            self._find_packs()

    def _find_decoders(self) -> None:
        """Find the other decoders, if the user named one."""
        named = self.session.datamodule.decoder
        if named == "auto":
            return
        for name in DECODER_NAMES:
            if name not in ("auto", named):
                self._find(f'decoder="{name}"', partial(self._decoder, name))

    def _find_packs(self) -> None:
        """Find the kinds of pack that can be made from the folder."""
        short_side = self._short_side()
        for decoded, size in ((True, None), (True, short_side), (False, short_side)):
            if decoded or size is not None:
                changes = ImageChanges(short_side=size, decoded=decoded)
                self._find(f"pack{pack_options(size, decoded=decoded)}", partial(self._pack, changes))

    def _find(self, code: str, find: Callable[[str], _Change | None]) -> None:
        """Add a change, unless it does not exist, cannot be tried, or is there already."""
        if code in self._timer.steps:
            return
        try:
            change = find(code)
        except FeedError as why:
            self._leave_out(code, why)
            return
        if change is not None:
            self.changes.append(change)
            self._timer.step(code)

    def _fast(self, code: str) -> _Change | None:
        recipe = self._images.recipe
        if not isinstance(recipe, TrainRecipe) or recipe.quality == "fast":
            return None
        require("cv2", extra="images", why=code)
        return _Change(
            setting="quality", value="fast", code=code, dataset=self._twin(recipe=replace(recipe, quality="fast"))
        )

    def _decoder(self, name: str, code: str) -> _Change:
        dataset = self._twin(decoder=make_decoder(name).decoder)
        return _Change(setting="decoder", value=name, code=code, dataset=dataset)

    def _nvjpeg(self, code: str) -> _Change:
        datamodule = self.session.datamodule
        check_backend("nvjpeg", datamodule.quality, datamodule._images_only_torch())
        require_nvjpeg(self.session.device)
        return _Change(
            setting="backend", value="nvjpeg", code=code, dataset=self._twin(encoded=True, cpu_part=CpuShare())
        )

    def _pack(self, changes: ImageChanges, code: str) -> _Change:
        stored = _Stored(self._images.source, changes)
        path = f"{self._root()}{_suffix(changes)}"
        return _Change(setting="root", value=path, code=code, dataset=self._twin(stored), stored=stored)

    def _root(self) -> Path:
        """Return the folder of images, with a name to which the name of a pack can be added."""
        root = Path(self.session.datamodule._feed.data_dir)
        if root.name in ("", ".."):
            return root.resolve()
        return root

    def _short_side(self) -> int | None:
        """Return the shorter side of images in a pack that are large enough for the crops; None if the size of the
        crops is unknown."""
        recipe = self._images.recipe
        if isinstance(recipe, TrainRecipe):
            return round(recipe.size * _LARGER)
        crop = cropping_step(recipe.transform) if isinstance(recipe, UserTransform) else None
        return None if crop is None else round(max(crop.size) * _LARGER)

    # --- the samples ----------------------------------------------------------------------------------------------

    def make(self, beat: Heartbeat) -> None:
        """Make samples in all ways, until the time is over. The first sample does not count."""
        own = self._timer.step(_OWN)
        began = time.monotonic()
        for seed, index in enumerate(self.part.first_samples(MOST_SAMPLES)):
            _, inner = innermost(self.part.loader.dataset, index)
            if not self._prepare(inner):
                continue
            with naming(self._own, index):
                self._call(own, self._own, inner, seed)
            for change in self.changes:
                try:
                    sample = self._call(change.code, change.dataset, inner, seed)
                except Exception as error:  # noqa: BLE001  # the other changes do not need this one
                    self._leave_out(change.code, f"it failed: {in_a_line(error)}")
                    continue
                if change.setting == "backend" and len(self._encoded) < _MOST_DECODED:
                    self._encoded.append(sample)
            self.count += self._timer.on
            self._timer.on = True
            if beat.stopped or (self.count and time.monotonic() - began > self.session.share_s):
                return
            beat.beat()

    def _prepare(self, index: int) -> bool:
        """Read an image, and store it as each pack would. Returns False if that is impossible."""
        stores = [change.stored for change in self.changes if change.stored is not None]
        try:
            data = bytes(self._images.read(index))
            for stored in stores:
                stored.store(data)
        except DatasetError:
            return False
        self._read += 1
        self._read_bytes += len(data)
        return True

    def _call(self, step: str, dataset: ImageDataset, index: int, seed: int) -> Any:
        torch.manual_seed(seed)
        return self._timer.call(step, dataset.__getitem__, index)

    # --- the results ----------------------------------------------------------------------------------------------

    def results(self) -> Iterator[LighterSample]:
        """Yield the results; of several decoders, only that of the fastest."""
        decoders: list[LighterSample] = []
        for change in self.changes:
            try:
                result = self._result(change)
            except NotMeasurable as why:
                self._leave_out(change.code, why)
            except Exception as error:  # noqa: BLE001  # the other changes do not need this one
                self._leave_out(change.code, f"it failed: {in_a_line(error)}")
            else:
                if change.setting != "decoder":
                    yield result
                    continue
                decoders.append(result)
        if decoders:
            yield min(decoders, key=lambda result: result.then_ms)

    def _result(self, change: _Change) -> LighterSample:
        """Return the result of a change.

        Raises:
            NotMeasurable: the pack would make no image smaller, or there is no room for it.
        """
        device_ms = None
        if change.setting == "backend":
            device_ms = decoding_ms(self._encoded, change.dataset, self.session.device)
        return LighterSample(
            setting=change.setting,
            value=change.value,
            now_ms=self._cpu_ms(_OWN),
            then_ms=self._cpu_ms(change.code),
            device_ms=device_ms,
            pack=None if change.stored is None else self._packed(change.stored, change.value),
        )

    def _cpu_ms(self, step: str) -> float:
        return self._timer.steps[step].cpu_ns / self.count / 1e6

    def _packed(self, stored: _Stored, path: str) -> PackedImages:
        """Describe the pack that would hold these samples, with estimated sizes.

        Raises:
            NotMeasurable: the pack would make no image smaller, or there is no room for it.
        """
        changes = stored.changes
        root = str(self._root())
        if changes.short_side is not None and not stored.resized:
            raise NotMeasurable(f"no image of those looked at is larger than {changes.short_side} pixels")
        if "://" in str(self.session.datamodule._feed.data_dir):
            raise NotMeasurable("the images are at a URL, and a pack is made from a folder")
        samples = len(_unchosen(self._images.source))
        pack = PackedImages(
            root=root,
            path=path,
            short_side_px=changes.short_side,
            decoded=changes.decoded,
            folder_bytes=samples * self._read_bytes // self._read,
            pack_bytes=samples * stored.total_bytes // self._read,
        )
        size = size_text(pack.pack_bytes)
        room_bytes = find_room(Path(path).absolute().parent).left_bytes
        memory_bytes = self.session.machine.available_memory_bytes
        if pack.pack_bytes > room_bytes:
            raise NotMeasurable(f"it would take {size}, and {size_text(room_bytes)} are free beside {root}")
        if changes.decoded and memory_bytes is not None and pack.pack_bytes > MEMORY_SHARE * memory_bytes:
            free = f"{size_text(memory_bytes)} of memory are free"
            raise NotMeasurable(f"it would take {size}, and {free}: it would be read from storage in each epoch")
        return pack


def _unchosen(source: SampleSource) -> SampleSource:
    """Return the source from which a share was chosen for training; any other source itself."""
    if isinstance(source, Chosen):
        return source.source
    return source


def _suffix(changes: ImageChanges) -> str:
    """Return the end of the name of a pack with these changes: ``.pixels``, ``-256.pack``."""
    size = "" if changes.short_side is None else f"-{changes.short_side}"
    return f"{size}.{'pixels' if changes.decoded else 'pack'}"
