"""One fit of the verdict benchmark: a Trainer, a model that takes a known time, GPUStarvationCallback, its verdict.

The device is simulated: ``training_step`` blocks for ``device_ms`` without using a CPU, as a host does that waits for
an accelerator in each step. ``host_ms`` comes on top where the CPU itself is to compute. Where the device is ``queued``
the step goes on at once, and the callback measures by the events of a device that works its queue off in real time.
"""

import logging
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from verdict_work import Cost, Nothing, Samples, Sleep, Spin

from lightning_feed import GPUStarvationCallback
from lightning_feed.callbacks import starvation as starvation_callback
from lightning_feed.callbacks import starvation_facts, starvation_run
from lightning_feed.measure.measurements import LoopFacts
from lightning_feed.measure.step_meter import RING_SIZE, EventRing
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Diagnosis

MS = 1_000_000
WINDOW = 20
"""Steps between two looks at the workers."""


class QueuedDevice:
    """Its queue is known by when it will be empty; nothing runs.

    Args:
        ahead: steps of work that may be queued before the host blocks.
    """

    def __init__(self, ahead: int = 2) -> None:
        self.free_at = time.perf_counter_ns()
        self._ahead = ahead
        self._busy_ns = 0
        self._began_at: int | None = None

    def launch(self, ms: float) -> None:
        """Queue work. The host goes on at once, unless the queue is full."""
        self._sleep_until(self.free_at - round((self._ahead - 1) * ms * MS))
        if self._began_at is None:
            self._began_at = time.perf_counter_ns()
        self._busy_ns += round(ms * MS)
        self.free_at = max(self.free_at, time.perf_counter_ns()) + round(ms * MS)

    def steady_util_pct(self) -> float | None:
        """What NVML would show: the share of the time since the first work in which the device had any."""
        if self._began_at is None:
            return None
        return min(100.0, 100 * self._busy_ns / (time.perf_counter_ns() - self._began_at))

    def forget_steps(self) -> None:
        """The queue is worked off all the same."""

    def take(self) -> None:
        """No figures of a window."""

    def stop(self) -> None:
        """Nothing runs."""

    def synchronize(self) -> None:
        """Wait for all that is queued, as ``.item()`` does."""
        self._sleep_until(self.free_at)

    def copy(self, ms: float, *, pinned: bool) -> None:
        """Copy a batch: behind what is queued, or after it while the host waits."""
        if pinned:
            self.launch(ms)
        elif ms:
            self.synchronize()
            time.sleep(1e-3 * ms)

    def event(self) -> "QueuedEvent":
        """An event to record behind what is queued."""
        return QueuedEvent(self)

    @contextmanager
    def measured(self, scenario: "Scenario") -> Iterator[None]:
        """While entered, GPUStarvationCallback measures by this device's events."""
        usual = starvation_facts.facts_of

        def facts_of(*arguments: Any, **options: Any) -> LoopFacts:
            facts: LoopFacts = usual(*arguments, **options)
            if not scenario.is_gpu:
                return facts
            return replace(
                facts,
                device_type="cuda",
                syncs=scenario.syncs,
                loader=replace(facts.loader, pin_memory=scenario.pin_memory),
                datamodule=replace(facts.datamodule, backend=scenario.backend),
            )

        ring = EventRing(self.event, RING_SIZE)
        nvml = self if scenario.is_gpu else None
        with (
            mock.patch.object(starvation_callback, "_start_nvml", return_value=nvml),
            mock.patch.object(starvation_run, "open_ring", return_value=ring),
            mock.patch.object(starvation_run, "facts_of", facts_of),
        ):
            yield

    def _sleep_until(self, moment: int) -> None:
        time.sleep(max(0.0, (moment - time.perf_counter_ns()) * 1e-9))


class QueuedEvent:
    """Passes when the device has come to it."""

    def __init__(self, device: QueuedDevice) -> None:
        self._device, self._at = device, 0

    def record(self) -> None:
        """Behind what is queued now."""
        self._at = max(time.perf_counter_ns(), self._device.free_at)

    def query(self) -> bool:
        """Whether the device has come to it."""
        return time.perf_counter_ns() >= self._at

    def elapsed_time(self, end_event: "QueuedEvent") -> float:
        """Milliseconds."""
        return (end_event._at - self._at) / MS

    def synchronize(self) -> None:
        """Wait for it."""
        self._device._sleep_until(self._at)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A fault, how to make it, and the verdict that names it."""

    family: str
    expect: tuple[Bottleneck, Cause]
    data: Callable[[Path], Any]
    """Makes what the fit loads from; takes the folder of files to read."""
    slow_rank: int | None = None
    """Two ranks train; this one loads from ``data``, the other from a fast loader."""
    device_ms: float = 4.0
    host_ms: float = 0.0
    queued: bool = False
    steps: int = 120
    """In each epoch, warm-up included."""
    epochs: int = 1
    callbacks: Callable[[], list[Callback]] = list
    options: dict[str, Any] = field(default_factory=dict)
    """Of the Trainer."""
    copy_ms: float = 0.0
    """Copy to a queued device in each step: queued if pinned; else the host waits for what is queued, and for it."""
    is_gpu: bool = False
    """A queued device counts as a GPU, with the loader and the synchronisations that follow."""
    pin_memory: bool = True
    syncs: tuple[str, ...] = ()
    backend: str | None = None
    transfer: Cost = field(default_factory=Nothing)
    """In ``transfer_batch_to_device``."""
    after_transfer: Cost = field(default_factory=Nothing)
    """In ``on_after_batch_transfer``."""


class Model(LightningModule):
    """Waits, works, and trains one layer."""

    def __init__(self, scenario: Scenario, files: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.scenario, self.files = scenario, files
        self.device_queue = QueuedDevice() if scenario.queued else None
        self.device_part = Sleep(scenario.device_ms) if scenario.device_ms else Nothing()
        self.host_part = Spin(scenario.host_ms) if scenario.host_ms else Nothing()

    def train_dataloader(self) -> Any:
        slow = self.scenario.slow_rank
        if slow is not None and self.global_rank != slow:
            return DataLoader(Samples(Nothing()), num_workers=1)
        return self.scenario.data(self.files)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(Nothing(), length=8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.device_queue is not None:
            self.device_queue.launch(self.scenario.device_ms)
        else:
            self.device_part(batch_idx)
        self.host_part(batch_idx)
        loss: Tensor = self.layer(torch.ones(1, 1)).sum()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.device_part(batch_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.scenario.transfer(0)
        if self.device_queue is not None:
            self.device_queue.copy(self.scenario.copy_ms, pinned=self.scenario.is_gpu and self.scenario.pin_memory)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.scenario.after_transfer(0)
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class SlowHook(Callback):
    """A callback that takes its time."""

    def __init__(self, hook: str, cost: Cost) -> None:
        setattr(self, hook, lambda *_, **__: cost(0))


class Synchronize(Callback):
    """Waits for the device after each step, as one does that reads the loss."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        pl_module.device_queue.synchronize()


class ReadingProgressBar(Synchronize):
    """A progress bar that reads a metric from the device, and then draws while the device has nothing to do."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module)
        Spin(1.5)(0)


class SlowLogger(Logger):
    """A logger that takes its time: a server far away."""

    name = "slow"
    version = 0

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            self.cost(0)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Tell(Callback):
    """Writes what the callback of rank 0 says, where the ranks are processes of their own."""

    def __init__(self, said_by: GPUStarvationCallback, path: Path) -> None:
        self.said_by, self.path = said_by, path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_bytes(pickle.dumps(self.said_by.report()))


def run_fit(scenario: Scenario, files: Path) -> Diagnosis:
    """Train, and return the verdict."""
    starvation = GPUStarvationCallback(every_n_steps=WINDOW, report=False)
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few workers, of many, of no validation: that is what is measured here
        told = Path(scratch) / "told"
        ranks: dict[str, Any] = {}
        others = scenario.callbacks()
        if scenario.slow_rank is not None:
            others.append(_Tell(starvation, told))
            ranks = {
                "devices": 2,
                "strategy": DDPStrategy(start_method="fork", process_group_backend="gloo"),
                "use_distributed_sampler": False,
            }
        options: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": scenario.epochs,
            "limit_train_batches": scenario.steps,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": scratch,
        }
        trainer = Trainer(callbacks=[starvation, *others], **(options | ranks | scenario.options))
        model, data = Model(scenario, files), None
        if scenario.slow_rank is None:
            data = scenario.data(files)
        with model.device_queue.measured(scenario) if model.device_queue is not None else nullcontext():
            if isinstance(data, LightningDataModule):
                trainer.fit(model, datamodule=data)
            else:
                trainer.fit(model, train_dataloaders=data)
        return pickle.loads(told.read_bytes()) if ranks else starvation.report()


@contextmanager
def two_cpus() -> Iterator[None]:
    """Use two CPUs only, if there are more: six workers are then too many on every machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def hush() -> None:
    """No word from Lightning or from us on each of many fits."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_feed"):
        logging.getLogger(name).setLevel(logging.ERROR)
