"""Training on the simulated device: a loader in simulated time, a module whose step takes a given time, a Trainer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from simulated.device import DEVICE, MS, SimulatedDevice, Span, Wait, outside, simulated
from torch import Tensor, nn


class Production:
    """Worker processes, batch ``k`` made by worker ``k % workers``, handed out in order, at most ``capacity`` ready.

    Args:
        periods: milliseconds that a worker takes for a batch, repeated.
        workers: number of them.
        prefetch: batches that each holds ready.
    """

    def __init__(self, periods: Sequence[float], *, workers: int = 1, prefetch: int = 2) -> None:
        self._periods = periods
        self._workers = workers
        self._capacity = workers * prefetch
        self._ready: list[int] = []
        self._taken: list[int] = []
        self.began = 0

    def next_ready_at(self, now: int) -> int:
        """When the next batch can be handed out; it counts as taken then."""
        number = len(self._taken)
        while len(self._ready) <= number:
            made = len(self._ready)
            asked = self._taken[made - self._capacity] if made >= self._capacity else self.began
            free = self._ready[made - self._workers] if made >= self._workers else self.began
            period = self._periods[made % len(self._periods)]
            self._ready.append(max(asked, free) + round(period * MS))
        moment = max(now, self._ready[number])
        self._taken.append(moment)
        return moment


def numbers(index: int) -> Any:
    """Batch ``index`` is all ``index``."""
    return torch.full((4, 8), float(index))


class SimulatedLoader:
    """Hands out batches when they are ready in simulated time; the host waits for them.

    Args:
        device: whose host waits.
        batches: in an epoch.
        period_ms: the time between two batches, made beside the training.
        periods_ms: one time after the other in its place, repeated.
        pinned: whether they lie in page-locked memory.
        make: the batch of an index.
        in_main_process: the host makes them itself, as with ``num_workers=0``.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        batches: int,
        *,
        period_ms: float = 0.0,
        periods_ms: Sequence[float] | None = None,
        pinned: bool = True,
        make: Callable[[int], Any] = numbers,
        in_main_process: bool = False,
    ) -> None:
        self.device = device
        self.batches = batches
        self.period_ms = period_ms
        self.periods_ms = [period_ms] if periods_ms is None else periods_ms
        self.pinned = pinned
        self.make = make
        self.in_main_process = in_main_process
        self.waits: list[Span] = []
        """When the host was in the loader, one span for each batch."""

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        production = Production(self.periods_ms)
        production.began = self.device.now
        for index in range(self.batches):
            began = self.device.now
            if self.in_main_process:
                self.device.host(self.period_ms)
            else:
                self.device.now = production.next_ready_at(began)
            self.waits.append((began, self.device.now))
            batch = self.make(index)
            if self.pinned:
                torch.utils._pytree.tree_map_only(Tensor, self.device.pin, batch)
            yield batch


class Model(LightningModule):
    """A step of one long kernel that reads the batch, and a few short ones that make a loss.

    Args:
        device: to run on.
        compute_ms: of the long kernel.
        synchronise: whether the host waits for the device in each step.
    """

    def __init__(self, device: SimulatedDevice, compute_ms: float = 1.0, *, synchronise: bool = False) -> None:
        super().__init__()
        self.sim = device
        self.compute_ms = compute_ms
        self.synchronise = synchronise
        self.net = nn.Linear(8, 1)
        self.seen: list[float] = []
        """The first value of each batch that was trained on."""
        self.ended_at: list[int] = []
        """When the device has done what was queued up to the end of each step."""
        self.waits: list[Wait] = []
        """What the host waited for, from the first step to the last."""
        self._waits_before = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = first_tensor(batch)
        self.seen.append(self.sim.content(first).flatten()[0].item())
        self.sim.launch(self.compute_ms, what="training_step", reads=batch)
        loss: Tensor = self.net(first.float().reshape(-1, 8)).mean()
        if self.synchronise:
            loss.item()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.ended_at:
            self._waits_before = len(self.sim.waits)

    def on_train_epoch_end(self) -> None:
        self.waits = self.sim.waits[self._waits_before :]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.ended_at.append(self.sim.compute.free_at)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.sim.launch(self.compute_ms, what="validation_step", reads=batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Accelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """Whatever it is."""


def _trainer(callbacks: Sequence[Callback], **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        **options,
    }
    strategy = SingleDeviceStrategy(device=DEVICE, accelerator=_Accelerator())
    return Trainer(strategy=strategy, callbacks=list(callbacks), **given)


def fit(
    device: SimulatedDevice, model: LightningModule, loader: Any, *callbacks: Callback, val: Any = None, **options: Any
) -> Trainer:
    """A fit on the device; errors come through."""
    with simulated(device):
        trainer = _trainer(callbacks, **options)
        trainer.fit(model, loader, val)
    return trainer


def evaluate(
    device: SimulatedDevice,
    entry: Literal["validate", "test", "predict"],
    model: LightningModule,
    loaders: Any,
    *callbacks: Callback,
) -> None:
    """One of the other entries of a Trainer on the device."""
    with simulated(device):
        getattr(_trainer(callbacks), entry)(model, loaders)


def first_tensor(batch: Any) -> Tensor:
    return next(leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor))


def idle_ns(device: SimulatedDevice, loader: SimulatedLoader, since: int) -> int:
    """The truth about starvation: the host in the loader while the compute stream has nothing left to do."""
    busy = [span for span in device.compute.busy if span[1] > since]
    return sum(outside((max(start, since), end), busy) for start, end in loader.waits if end > since)
