"""PrefetchCallback on a real device: same weights, no corrupted batch, bounded memory, work on its own stream."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from on_cuda import fitted
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_feed import PrefetchCallback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
]


class Pictures(Dataset[Any]):
    """Picture i is all i, so that a batch whose memory was handed on too early gives itself away."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3, 128, 128), index % 251, dtype=torch.uint8), "meta": torch.tensor(index)}


class Checks(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Conv2d(3, 8, 5)
        self.wrong = 0
        self.mistakes: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch["x"].is_cuda
        pictures = batch.pop("x").float() / 255  # drops the last reference to the copied memory at once
        loss = self.net(pictures).square().mean()
        for _ in range(20):  # keep the compute stream behind the host
            pictures = pictures * 1.0
        expected = (batch["meta"].to(self.device, non_blocking=True) % 251).float() / 255
        self.mistakes.append((pictures != expected[:, None, None, None]).any())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(callbacks: list[Callback], *, batches: int = 60, workers: int = 2, epochs: int = 2) -> Checks:
    torch.manual_seed(0)
    loader = DataLoader(Pictures(32 * batches), batch_size=32, num_workers=workers, pin_memory=True)
    model: Checks = fitted(Checks(), loader, *callbacks, max_epochs=epochs)
    return model


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_batch_is_corrupted(depth: int, workers: int) -> None:
    callback = PrefetchCallback(depth=depth, host_keys=("meta",))
    model = fit([callback], workers=workers)
    assert callback.active
    assert len(model.mistakes) == 120
    assert not any(mistake.item() for mistake in model.mistakes)


def test_same_weights_as_without() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, ours = fit([]), fit([PrefetchCallback()])
    finally:
        torch.use_deterministic_algorithms(False)
    for expected, weight in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


def test_memory_does_not_grow_with_epochs() -> None:
    reserved: list[int] = []

    class Reads(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            reserved.append(torch.cuda.memory_reserved())

    fit([PrefetchCallback(), Reads()], batches=20, epochs=8)
    assert reserved[-1] <= reserved[1]


def test_the_copy_runs_on_its_own_stream_and_the_users_hook_does_not() -> None:
    streams: dict[str, set[int]] = {"transfer": set(), "after": set()}

    class Notes(Checks):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            streams["transfer"].add(torch.cuda.current_stream().cuda_stream)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            streams["after"].add(torch.cuda.current_stream().cuda_stream)
            return batch

    main = torch.cuda.current_stream().cuda_stream
    fitted(Notes(), DataLoader(Pictures(320), batch_size=32, pin_memory=True), PrefetchCallback(), max_epochs=1)
    assert len(streams["transfer"]) == 2  # the first batch of the epoch is copied as ever
    assert streams["after"] == {main}


def test_no_synchronisation_is_added() -> None:
    """CUDA itself raises where something waits: `error` mode covers `.item()`, `.cpu()` and pageable copies."""

    class Strict(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            torch.cuda.set_sync_debug_mode("default")

    class Plain(Checks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch["x"].float() / 255).square().mean()

    torch.manual_seed(0)
    loader = DataLoader(Pictures(640), batch_size=32, pin_memory=True)
    try:
        fitted(Plain(), loader, PrefetchCallback(host_keys=("meta",)), Strict(), max_epochs=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
