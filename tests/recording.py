"""A module that writes down all that happens to it, and a way to run the same fit with and without callbacks."""

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_feed import PrefetchCallback
from lightning_feed.transfer.prefetcher import SideStream


class NullStreamPrefetch(PrefetchCallback):
    """PrefetchCallback at work on the CPU: the whole injection, in program order."""

    def open_stream(self, device: torch.device) -> SideStream:
        return SideStream()


class Numbers(Dataset[Tensor]):
    """Sample i is (i, i, i, i), plus noise from the global generator when asked: as a dataset that augments."""

    def __init__(self, size: int, *, noise: bool = False, first: int = 0) -> None:
        self.size, self.noise, self.first = size, noise, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        sample = torch.full((4,), float(self.first + index))
        return sample + torch.rand(4) if self.noise else sample


class Stream(IterableDataset[Tensor]):
    """The same samples without a length."""

    def __init__(self, size: int, *, noise: bool = False) -> None:
        self.inner = Numbers(size, noise=noise)

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, len(self.inner), step):
            yield self.inner[index]


def summary(batch: Any) -> Any:
    """What is in a batch, as plain values."""
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: summary(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [summary(value) for value in batch]
    if hasattr(batch, "to_dict"):  # of PyTorch Geometric, and TensorDict
        return summary(batch.to_dict())
    return batch if isinstance(batch, (str, int, float, type(None))) else repr(type(batch))


def first_tensor(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    batch = batch.to_dict() if hasattr(batch, "to_dict") else batch
    values = batch.values() if isinstance(batch, dict) else batch
    return first_tensor(next(value for value in values if value is not None and not isinstance(value, str)))


class Recording(LightningModule):
    """Trains a small network with dropout, so that the order of random draws shows in the weights."""

    def __init__(self, optimizers: int = 1, *, manual: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.many = optimizers
        self.automatic_optimization = not manual
        self.events: list[tuple[Any, ...]] = []

    def note(self, *event: Any) -> None:
        self.events.append(event)

    def loss(self, batch: Any) -> Tensor:
        return self.net(first_tensor(batch).to(self.net[0].weight.dtype) / 100).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.note("training_step", batch_idx, summary(batch))
        loss = self.loss(batch)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        return None

    def _evaluate(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        self.note(name, batch_idx, dataloader_idx, summary(batch))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self._evaluate("validation_step", batch, batch_idx, dataloader_idx))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self._evaluate("test_step", batch, batch_idx, dataloader_idx))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self._evaluate("predict_step", batch, batch_idx, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("on_before_batch_transfer", dataloader_idx, summary(batch))
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.note("transfer_batch_to_device", str(device), dataloader_idx, summary(batch))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("on_after_batch_transfer", dataloader_idx, summary(batch))
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start", batch_idx, summary(batch))

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end", self.current_epoch, self.global_step)

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9) for _ in range(self.many)]
        return made if self.many > 1 else made[0]


TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def by_hook(events: list[tuple[Any, ...]]) -> dict[str, list[tuple[Any, ...]]]:
    """Events sorted by hook: looking ahead moves a hook in time, never among its own calls."""
    return _sorted(events, lambda event: event[0])


def by_hook_and_loader(events: list[tuple[Any, ...]]) -> dict[str, list[tuple[Any, ...]]]:
    """The same for training and validation apart: validation samples are numbered from 1000."""
    return _sorted(events, lambda event: f"{event[0]} {_largest(event[-1]) >= 1000}")


def _sorted(events: list[tuple[Any, ...]], key: Callable[[tuple[Any, ...]], str]) -> dict[str, list[tuple[Any, ...]]]:
    groups: dict[str, list[tuple[Any, ...]]] = {}
    for event in events:
        groups.setdefault(key(event), []).append(event[1:])
    return groups


def _largest(values: Any) -> float:
    return max(map(_largest, values), default=0) if isinstance(values, list) else float(values)


def quiet_trainer(callbacks: list[Callback], **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
    }
    return Trainer(callbacks=callbacks, **{**defaults, **options})


def fit(
    callbacks: list[Callback],
    loaders: Callable[[], dict[str, Any]],
    module: Callable[[], Recording] = Recording,
    **options: Any,
) -> tuple[Recording, Trainer, Exception | None]:
    """One seeded fit; an error is returned, not raised, so that two runs can be compared."""
    seed_everything(7, workers=True, verbose=False)
    random.seed(7)
    model = module()
    trainer = quiet_trainer(callbacks, **options)
    try:
        trainer.fit(model, **loaders())
    except Exception as error:  # noqa: BLE001  # the caller compares it
        end_workers()
        return model, trainer, error
    return model, trainer, None


def end_workers() -> None:
    """End the workers of torch's loaders now. An iterator that dies with a traceback waits 5 s for each of them."""
    for thing in gc.get_objects():
        if type(thing) is _MultiProcessingDataLoaderIter:  # isinstance would wake the proxies of deprecated names
            thing._shutdown_workers()


def assert_same_run(
    loaders: Callable[[], dict[str, Any]],
    module: Callable[[], Recording] = Recording,
    prefetch: Callable[[], PrefetchCallback] = NullStreamPrefetch,
    *,
    error: str | None = None,
    group: Callable[[list[tuple[Any, ...]]], dict[str, list[tuple[Any, ...]]]] = by_hook,
    beside: Callable[[], tuple[list[Callback], list[Callback]]] = lambda: ([], []),
    **options: Any,
) -> PrefetchCallback:
    """With and without the callback: the same hooks with the same arguments, the same weights to the bit.

    ``error`` is in the message of the exception that both runs must end with; without it neither may fail. ``beside``
    makes the callbacks that stand before ours, and those after it.
    """
    before, after = beside()
    plain, plain_trainer, plain_error = fit([*before, *after], loaders, module, **options)
    assert (plain_error is not None and error in str(plain_error)) if error else plain_error is None, plain_error
    callback = prefetch()
    before, after = beside()
    ours, our_trainer, our_error = fit([*before, callback, *after], loaders, module, **options)
    assert repr(our_error) == repr(plain_error)
    ours_by_hook, plain_by_hook = group(ours.events), group(plain.events)
    if plain_error is not None:  # hooks of batches that were never trained may have run ahead
        for hook in TRANSFER_HOOKS:
            ours_by_hook.pop(hook, None), plain_by_hook.pop(hook, None)
    assert ours_by_hook == plain_by_hook
    assert our_trainer.global_step == plain_trainer.global_step
    for ours_weight, plain_weight in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours_weight, plain_weight)
    return callback


class WritesPerRank(Callback):
    """Leaves what each rank saw in ``folder/rank<N>.pt``, for tests that start processes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seen = [event[2] for event in pl_module.events if event[0] == "training_step"]
        weights = [parameter.detach().clone() for parameter in pl_module.parameters()]
        torch.save({"seen": seen, "weights": weights}, f"{self.folder}/rank{trainer.global_rank}.pt")
