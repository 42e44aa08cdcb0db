"""Images decoded by the device, and datasets that stay there: through a Trainer on the simulated device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from images.made_images import WHOLE
from made_samples import batch_of, dataset, jpegs
from simulated.device import DEVICE, NOT_CHECKED, SimulatedDevice, simulated
from simulated.image_decoders import image_decoders
from simulated.training import Model, SimulatedLoader, fit
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.data.images import IMAGENET_MEAN, IMAGENET_STD
from lightning_feed.images.crop import EvalRecipe, TrainRecipe
from lightning_feed.images.dali_binding import DaliOptions
from lightning_feed.images.dali_decoder import DaliImageDecoder, PipelineSpec, _Waiting
from lightning_feed.images.device_decode import decode_batch
from lightning_feed.images.nvjpeg import NvJpeg
from lightning_feed.images.ragged_crop import normalization_of
from lightning_feed.transfer.resident import ResidentLoader, load_resident

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


class Images(Model):
    """As with ``backend="nvjpeg"``: files come, and are decoded in the transfer to the device."""

    def __init__(self, device: SimulatedDevice, compute_ms: float = 10.0) -> None:
        super().__init__(device, compute_ms)
        self.files = dataset(jpegs(6), TrainRecipe(size=16), decoder="pillow")
        self.decoder: Any = None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if self.decoder is None:
            self.decoder = self.open_decoder(device)
        return decode_batch(batch, self.files, device, decode=self.decoder)

    def open_decoder(self, device: torch.device) -> Any:
        return NvJpeg(device)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        self.seen.append(batch_idx)
        self.sim.launch(self.compute_ms, what="training_step", reads=[images, labels])
        return self.net(images.flatten().float()[:8]).mean()


@pytest.fixture(params=["torchvision", "torchcodec"])
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice]:
    made = SimulatedDevice()
    with image_decoders(made, request.param):
        yield made


def train(model: Images, *callbacks: Any) -> list[str]:
    def make(index: int) -> Any:
        batch = batch_of(model.files, index)
        model.sim.pin(batch.labels)
        return batch

    loader = SimulatedLoader(model.sim, 8, make=make, pinned=False)
    fit(model.sim, model, loader, *callbacks)
    assert model.seen == list(range(8))
    return model.sim.races


def test_decoding_on_the_device_is_race_free_with_and_without_prefetching(device: SimulatedDevice) -> None:
    assert train(Images(device)) == []
    starvation = GPUStarvationCallback(report=False)
    assert train(Images(device), PrefetchCallback(), starvation) == []


@pytest.mark.parametrize("library", ["torchvision", "torchcodec"])
def test_nvjpeg_is_called_by_the_library_that_is_there_and_is_done_with_the_files(library: str) -> None:
    device = SimulatedDevice()
    with image_decoders(device, library) as decoders, simulated(device):
        decode = NvJpeg(DEVICE)
        decode([torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in jpegs(3)])
        assert decode.library == library
        assert decoders.nvjpeg[-1] == 3
        assert decoders.decoded.query()  # the files may be freed


def test_decoding_makes_only_waits_that_torchs_sync_debug_mode_allows(device: SimulatedDevice) -> None:
    model = Images(device)
    train(model, PrefetchCallback())
    assert {wait.what for wait in model.waits} <= NOT_CHECKED
    device.waits.clear()
    with simulated(device):
        normalization_of.__wrapped__(IMAGENET_MEAN, IMAGENET_STD, torch.float32, DEVICE)
    assert {wait.what for wait in device.waits} <= NOT_CHECKED
    assert device.waits  # and it is safe on any stream


def test_images_decoded_on_the_host_beside_dali_are_copied_without_waiting() -> None:
    """On the GPU, where the batch is normalised. The second image is broken, and the first takes its place."""
    device = SimulatedDevice()
    files = dataset([WHOLE["GIF"], None, *jpegs(1)], EvalRecipe(size=16), decoder="pillow", on_error="skip")
    spec = PipelineSpec(
        batch_size=3,
        device=DEVICE,
        threads=1,
        options=DaliOptions(),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        half=False,
    )
    batch = batch_of(files)
    waiting = _Waiting(batch, batch.images(), {0: "GIF", 1: "broken"})
    with simulated(device):
        made = torch.empty((3, 3, 16, 16), device=DEVICE)
        images, labels = DaliImageDecoder(files, spec, keep=False)._put_host_images(made, waiting)
    assert (images.shape, images.device, labels.tolist()) == (made.shape, DEVICE, [0, 0, 20])
    assert device.waits == []


def test_decoding_runs_in_parallel_with_the_step(device: SimulatedDevice) -> None:
    """The host waits for the decoder, and the device computes meanwhile."""
    steps = {}
    for name, callbacks in (("plain", []), ("ahead", [PrefetchCallback()])):
        model = Images(device)
        train(model, *callbacks)
        steps[name] = (model.ended_at[-2] - model.ended_at[2]) / (len(model.ended_at) - 4) / 1e6
    assert steps["ahead"] == pytest.approx(10, rel=0.02)
    assert steps["plain"] == pytest.approx(10, rel=0.02)  # the host is ahead there, too


# --- resident data ----------------------------------------------------------------------------------------------------


class Rows(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        self.sim.launch(self.compute_ms, what="training_step", reads=batch)
        return self.net(batch[0]).mean()


def test_a_resident_dataset_is_gathered_on_the_device_and_copied_once() -> None:
    device = SimulatedDevice(copy_bytes_per_ms=1)
    with simulated(device):
        data = load_resident(TensorDataset(torch.rand(12, 8), torch.arange(12)), device=DEVICE)
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
        loader: DataLoader[Any] = ResidentLoader(data, batch_size=2, sampler=sampler)
    copies = device.copies
    callback = PrefetchCallback()
    model = Rows(device)
    fit(device, model, loader, callback, max_epochs=2)
    assert not callback.active
    assert device.races == []
    assert model.seen == [*range(6), *range(6)]
    assert device.copies - copies == 2 + 2  # the module's parameters, and the order of each epoch
    assert len(model.waits) == 2  # for that order: at the start of an epoch, not in a step
