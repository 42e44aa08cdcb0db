"""What tests on a CUDA device share: work of known length, batches, fits, and side streams with one fault each."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from recording import quiet_trainer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from lightning_feed import PrefetchCallback
from lightning_feed.transfer.prefetcher import DeviceStream

# --- work of known length ---------------------------------------------------------------------------------------------


@lru_cache
def cycles_per_ms() -> float:
    """How fast the device counts. Waits for the device: call :func:`warm_up` before waiting is forbidden."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):  # a device that had nothing to do raises its clock in tens of milliseconds
        torch.cuda._sleep(100_000_000)
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return float(100_000_000 / start.elapsed_time(end))


def spin(ms: float) -> None:
    """Keep the current stream busy for ``ms`` milliseconds; the host goes on at once."""
    torch.cuda._sleep(int(ms * cycles_per_ms()))


def warm_up() -> None:
    """Raise the clock, and pin enough small blocks for a host that runs ahead: pinning may wait for the device."""
    spin(100)
    blocks = [torch.empty(1024).pin_memory() for _ in range(100)]
    del blocks
    torch.cuda.synchronize()


class NoWaiting(Callback):
    """torch raises where the host waits for the device, from step 8 on: by then all streams have their memory."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")  # Lightning then moves the module to the host, which waits


# --- side streams -----------------------------------------------------------------------------------------------------

SLOW_MS = 20


class SlowCopies(DeviceStream):
    """Every copy begins ``SLOW_MS`` after it was issued, so that whoever does not wait for it is early."""

    @contextmanager
    def issue(self) -> Iterator[None]:
        with super().issue():
            spin(SLOW_MS)
            yield


class Unordered(SlowCopies):
    """Fault: the compute stream does not wait for the copy, only for itself."""

    def hand_over(self, batch: Any, mark: Any) -> None:
        reached = torch.cuda.Event()
        reached.record()
        super().hand_over(batch, reached)


class Unrecorded(DeviceStream):
    """Fault: the allocator is not told that the compute stream uses the batch."""

    def hand_over(self, batch: Any, mark: Any) -> None:
        super().hand_over(None, mark)


class FreshStreams(DeviceStream):
    """Fault: a new stream for each batch, with a memory pool of its own."""

    @contextmanager
    def issue(self) -> Iterator[None]:
        self.stream = torch.cuda.Stream(self._device)
        with super().issue():
            yield


class PrefetchOver(PrefetchCallback):
    """PrefetchCallback over a side stream of the kind ``stream``."""

    def __init__(self, stream: type[DeviceStream], **options: Any) -> None:
        super().__init__(**options)
        self.stream = stream

    def open_stream(self, device: torch.device) -> DeviceStream:
        return self.stream(device)


# --- batches ----------------------------------------------------------------------------------------------------------


class Pinned(Dataset[Tensor]):
    """Whole batches that lie in pinned memory from the start: fetching one takes no time."""

    def __init__(self, count: int, megabytes: int) -> None:
        self.count = count
        self.kept = [torch.full((megabytes << 20,), value, dtype=torch.uint8).pin_memory() for value in range(4)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.kept[index % 4]


def pinned_loader(count: int, megabytes: int) -> Any:
    return DataLoader(Pinned(count, megabytes), batch_size=None)


# --- fits -------------------------------------------------------------------------------------------------------------


class Seen(LightningModule):
    """Keeps what it was given, and waits for nothing: copies stay on the device until they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.given: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.see("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see("val", batch)

    def see(self, split: str, batch: Any) -> Tensor:
        images, labels = batch
        assert images.is_cuda
        assert labels.is_cuda
        self.given[split].append((images.clone(), labels.clone()))
        return nn.functional.cross_entropy(self.layer(images.float().mean((2, 3))), labels)

    def batches(self, split: str = "train") -> list[tuple[Tensor, Tensor]]:
        """What was given, in host memory: images as float32, and labels."""
        return [(images.float().cpu(), labels.cpu()) for images, labels in self.given[split]]

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


def fitted(model: LightningModule, data: Any, *callbacks: Any, val: Any = None, **options: Any) -> Any:
    """The model after a fit on one CUDA device, which has finished.

    Args:
        model: to train.
        data: a data module, or a loader.
        callbacks: of the Trainer.
        val: a loader to validate with, where ``data`` is a loader.
        options: of the Trainer, in place of ``quiet_trainer``'s.
    """
    if hasattr(data, "train_dataloader"):
        given = {"datamodule": data}
    else:
        given = {"train_dataloaders": data, "val_dataloaders": val}
    quiet_trainer(list(callbacks), accelerator="cuda", **options).fit(model, **given)
    torch.cuda.synchronize()
    return model
