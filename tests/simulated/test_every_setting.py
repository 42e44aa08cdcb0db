"""Each value of the settings that decide what a device does: from the public constructor through a Trainer on the
simulated device, to the calls that only a device can answer."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from simulated.device import SimulatedDevice
from simulated.image_decoders import ImageDecoders, dali_on_cpu, image_decoders
from simulated.training import Model, fit
from torch import Tensor

from lightning_feed import DaliOptions, ImageFolderDataModule, LoaderSettings, PrefetchCallback
from lightning_feed.images.dali_binding import upsamples_like_libjpeg

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
    # Torch itself sees no accelerator to pin for.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning"),
]

HEIGHT, WIDTH = 48, 64
"""Of the images of ``class_folders``."""
BATCHES = [4, 4, 3]
"""Images in the batches of training; one is left for validation."""


def dali_arguments(device: str) -> dict[str, Any]:
    """What DALI is asked for, besides what its inputs are."""
    given = {"batch_size": 4, "prefetch_queue_depth": 2, "device": device}
    if device == "cpu":
        return {**given, "device_id": None}
    return {
        **given,
        "device_id": 0,
        "jpeg_fancy_upsampling": upsamples_like_libjpeg(),
        "preallocate_height_hint": HEIGHT,
        "preallocate_width_hint": WIDTH,
    }


class Asked:
    """What the device was asked for in a fit."""

    def __init__(self, device: SimulatedDevice, decoders: ImageDecoders) -> None:
        self.nvjpeg = decoders.nvjpeg
        self.dali = [{name: given.get(name) for name in dali_arguments(given["device"])} for given in decoders.dali]
        self.registers = device.registrations > 0


def nothing(asked: Asked) -> None:
    """Batches are only copied."""
    assert (asked.nvjpeg, asked.dali, asked.registers) == ([], [], False)


def nvjpeg(asked: Asked) -> None:
    """One JPEG for each loader first, to see if nvJPEG works, then whole batches."""
    assert (asked.dali, asked.registers) == ([], False)
    assert Counter(asked.nvjpeg) == Counter([1, 1, *BATCHES, 1])


def tried(asked: Asked) -> None:
    """Some images are decoded to see which side is faster."""
    assert asked.dali == []
    assert max(asked.nvjpeg) > max(BATCHES)


def dali_cpu(asked: Asked) -> None:
    assert (asked.nvjpeg, asked.registers) == ([], False)
    assert asked.dali[0] == dali_arguments("cpu")


def dali_gpu(asked: Asked) -> None:
    assert (asked.nvjpeg, asked.registers) == ([], False)
    assert asked.dali[0] == dali_arguments("mixed")


def registers(asked: Asked) -> None:
    """Batches lie in memory that was registered for copies."""
    assert (asked.nvjpeg, asked.dali, asked.registers) == ([], [], True)


THREADS = LoaderSettings(num_workers=1, workers="thread")
SETTINGS: dict[str, tuple[Any, Callable[[Any], dict[str, Any]]]] = {
    "backend": (ImageFolderDataModule.__init__, lambda value: {"backend": value, "loader": THREADS}),
    "device": (DaliOptions, lambda value: {"backend": DaliOptions(device=value), "loader": THREADS}),
    "hand_over": (LoaderSettings, lambda value: {"loader": LoaderSettings(num_workers=1, hand_over=value)}),
    "workers": (LoaderSettings, lambda value: {"loader": LoaderSettings(num_workers=1, workers=value)}),
}
"""Where a setting is declared, and what a data module is given for a value."""
ANSWERED: dict[tuple[str, str], Callable[[Asked], None]] = {
    ("backend", "auto"): tried,
    ("backend", "torch"): nothing,
    ("backend", "nvjpeg"): nvjpeg,
    ("backend", "dali-cpu"): dali_cpu,
    ("backend", "dali-gpu"): dali_gpu,
    ("device", "cpu"): dali_cpu,
    ("device", "gpu"): dali_gpu,
    ("hand_over", "slots"): registers,
    ("hand_over", "torch"): nothing,
    ("workers", "process"): registers,
    ("workers", "thread"): nothing,
    ("workers", "ray"): nothing,
}
"""What a device is asked for with each value."""


def words_of(hint: Any) -> Iterator[str]:
    """The words in a type: ``Literal``s, in unions too."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from words_of(part)


VALUES = [(name, word) for name, (owner, _) in SETTINGS.items() for word in words_of(get_type_hints(owner)[name])]


def test_every_declared_value_has_a_row() -> None:
    assert set(VALUES) == set(ANSWERED)


class Labelled(Model):
    """Reads images and labels on the device."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        assert (images.is_meta, labels.is_meta, images.dtype) == (True, True, torch.float32)
        self.seen.append(len(images))
        self.sim.launch(self.compute_ms, what="training_step", reads=[images, labels])
        return self.net(images.flatten()[:8]).mean()


def asked(root: Path, **options: Any) -> Asked:
    """What a fit with such options asks for. All batches arrive, and no memory is read too early or too late."""
    device = SimulatedDevice()
    with image_decoders(device) as decoders, dali_on_cpu(decoders):
        model = Labelled(device)
        data = ImageFolderDataModule(root, 4, image_size=16, decoder="pillow", **options)
        fit(device, model, data, PrefetchCallback(), max_epochs=1)
        assert model.seen == BATCHES
        assert device.races == []
        return Asked(device, decoders)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")] if "ray" in pair else ())
        for pair in VALUES
    ],
)
def test_a_value_of_a_setting_reaches_the_device(name: str, value: str, class_folders: Path, request: Any) -> None:
    if value == "ray":
        request.getfixturevalue("one_ray")
    _, options = SETTINGS[name]
    ANSWERED[name, value](asked(class_folders, **options(value)))
