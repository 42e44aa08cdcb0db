"""GPUStarvationCallback: how long each step waits for data, for the copy, and for its own computing."""

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed.archive.shared_cache import CacheStats
from lightning_feed.errors import SettingsError
from lightning_feed.load.machine import read_machine
from lightning_feed.prefetch_callback import LOOK_AHEAD, PrefetchCallback
from lightning_feed.watch.clocks import open_ring
from lightning_feed.watch.nvml import NvmlSampler
from lightning_feed.watch.profiler_tap import tap_profiler
from lightning_feed.watch.reports.text import print_report
from lightning_feed.watch.stats import LoaderStats, StarvationStats
from lightning_feed.watch.step_meter import StepMeter
from lightning_feed.watch.tags import custom_scalar_layout, to_tags
from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts, Measurements
from lightning_feed.watch.verdict.tree import diagnose
from lightning_feed.watch.windows import UNFOLDED_STEPS, Ledger

logger = logging.getLogger(__name__)


@dataclass
class _Fit:
    """What lives only while a fit runs."""

    meter: StepMeter
    undo: list[Any]
    nvml: NvmlSampler | None
    every: int
    lost_before: int = 0
    logged_step: int = -1
    epoch_reported: bool = False
    reported_steps: int = 0
    cache_before: Any = None


class GPUStarvationCallback(Callback):
    """Measures how each training step divides into waiting for data, copying, computing and the rest.

    Nothing is synchronised: on a device the parts are times between events on the compute stream, read when they have
    passed, some steps later. On the CPU they are the host's times. The figures go to every logger of the Trainer, to
    the progress bar (``feed``: share of the step spent waiting for data), and into a report on the console.

    Args:
        every_n_steps: steps between two logged windows; None: the Trainer's ``log_every_n_steps``.
        nvml: read the GPU's utilisation, memory, power and PCIe traffic beside it, once a second.
        report: print the report at the end of the first epoch and of the fit.

    Raises:
        SettingsError: when ``every_n_steps`` is not a positive integer.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_feed import GPUStarvationCallback
        >>> starvation = GPUStarvationCallback(every_n_steps=20)
        >>> trainer = Trainer(callbacks=[starvation], logger=False, accelerator="cpu")
        >>> starvation.report().bottleneck
        'unknown'
    """

    def __init__(self, every_n_steps: int | None = None, nvml: bool = True, report: bool = True) -> None:  # noqa: FBT001, FBT002  # the promised signature
        whole = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if every_n_steps is not None and (not whole or every_n_steps < 1):
            raise SettingsError(
                f"GPUStarvationCallback(every_n_steps={every_n_steps!r}): give the number of steps between two logged "
                "windows, a whole number of 1 or more, or leave it out to log when the Trainer logs."
            )
        self.every_n_steps = every_n_steps
        self.nvml = nvml
        self.print_report = report
        self._fit: _Fit | None = None
        self._ledger = Ledger()
        self._facts = LoopFacts()
        self._prefetch_active: bool | None = None
        self._last: StarvationStats | None = None
        self._laid_out: weakref.WeakSet[Any] | None = None
        self._told: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners. A running fit can be neither.
        return {**self.__dict__, "_fit": None, "_laid_out": None}

    def summary(self) -> StarvationStats | None:
        """The last window that was closed, of this fit or the one before; None before the first."""
        return self._last

    def report(self) -> Diagnosis:
        """What limits training, from all steps measured in this fit or the last one."""
        stats = self._ledger.total(prefetch_active=self._prefetch_active)
        return diagnose(Measurements(stats=stats, facts=self._facts))

    # --- coming and going ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the clocks up, unless another instance measures already."""
        self._let_go()
        self._begin(trainer)

    def _begin(self, trainer: Any) -> None:
        if next(one for one in trainer.callbacks if isinstance(one, GPUStarvationCallback)) is not self:
            self._say_once(
                trainer, logging.WARNING, "A second GPUStarvationCallback stands aside: one measures already."
            )
            return
        device = trainer.strategy.root_device
        ring = open_ring(device)
        self._facts = self._look_at_run(trainer)
        self._ledger = Ledger(queue=_queue(trainer), trusted_clock=ring is not None or device.type == "cpu")
        self._last, self._prefetch_active = None, _prefetch_active(trainer)
        meter = StepMeter(self._ledger.fresh.append, ring=ring)
        meter.on_epoch_start = self._ledger.epoch_started
        meter.begin(epoch=False)
        every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps
        fit = self._fit = _Fit(meter, [], self._start_nvml(trainer, device), every)
        fetch, to_device, step = _host.step_actions(trainer)
        fit.undo.append(
            tap_profiler(
                trainer.profiler,
                {fetch: meter.fetch_began, step: meter.step_began, LOOK_AHEAD: meter.look_ahead_began},
                {
                    fetch: meter.fetch_ended,
                    to_device: meter.arrived,
                    step: meter.step_ended,
                    LOOK_AHEAD: meter.look_ahead_ended,
                },
                does_nothing=_host.profiler_does_nothing(trainer),
            )
        )
        if trainer.progress_bar_callback is not None:
            fit.undo.append(_host.Wrap(trainer.progress_bar_callback, "get_metrics", self._add_to_bar).undo)
        if trainer.is_global_zero:
            self._lay_out(trainer)
        if not trainer.loggers:
            self._say_once(
                trainer,
                logging.WARNING,
                "GPUStarvationCallback: the Trainer has no logger, so nothing is logged. summary() and report() "
                "still tell what was measured.",
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch: its first batch has a figure of its own."""
        if self._fit is not None:
            self._fit.meter.begin(epoch=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the training step in which this validation lies."""
        if self._fit is not None:
            self._fit.meter.leave_out_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is still on the device, and report."""
        fit = self._fit
        if fit is None:
            return
        fit.meter.end()
        if self._last is None:
            self._close_window(trainer, fit)
        if fit.meter.finished > fit.reported_steps:
            self._print(trainer, fit)
        self._let_go()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report after the first epoch of the fit."""
        if self._fit is not None and not self._fit.epoch_reported:
            self._fit.epoch_reported = True
            self._print(trainer, self._fit)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take out what was put in: teardown is not called after an exception."""
        self._let_go()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take out what was put in."""
        self._let_go()

    def _let_go(self) -> None:
        fit, self._fit = self._fit, None
        if fit is None:
            return
        while fit.undo:
            fit.undo.pop()()
        if fit.nvml is not None:
            fit.nvml.stop()

    # --- windows ------------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Close a window, and log it, where the Trainer logs."""
        fit = self._fit
        if fit is None:
            return
        if fit.every:
            step = _host.step_to_log(trainer, fit.every)
            if step is not None and step != fit.logged_step:
                fit.logged_step = step
                self._log_window(trainer, fit, step)
        if len(self._ledger.fresh) >= UNFOLDED_STEPS:
            self._ledger.fold()

    def _log_window(self, trainer: Trainer, fit: _Fit, step: int) -> None:
        stats = self._close_window(trainer, fit)
        if not trainer.is_global_zero or not trainer.loggers:
            return
        tags = to_tags(stats, fit.nvml.take() if fit.nvml is not None else None, _ask_loaders(trainer, fit))
        for each in trainer.loggers:
            each.log_metrics(tags, step=step)

    def _close_window(self, trainer: Trainer, fit: _Fit) -> StarvationStats:
        lost = fit.meter.lost
        self._prefetch_active = _prefetch_active(trainer)
        stats = self._ledger.close_window(lost=lost - fit.lost_before, prefetch_active=self._prefetch_active)
        fit.lost_before = lost
        self._last = stats
        return stats

    # --- what users see -----------------------------------------------------------------------------------------------

    def _print(self, trainer: Trainer, fit: _Fit) -> None:
        fit.reported_steps = fit.meter.finished
        if self.print_report and trainer.is_global_zero:
            print_report(self.report(), _host.bar_printer(trainer))

    def _add_to_bar(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        items = original(*args, **kwargs)
        if self._last is not None and self._last.starved_pct is not None:
            items = {**items, "feed": f"{self._last.starved_pct:.0f}%"}
        return items

    def _lay_out(self, trainer: Trainer) -> None:
        """Tell TensorBoard how to draw the tags, once for each of its writers."""
        if self._laid_out is None:
            self._laid_out = weakref.WeakSet()
        for each in trainer.loggers:
            experiment: Any = getattr(each, "experiment", None)
            if callable(getattr(experiment, "add_custom_scalars", None)) and experiment not in self._laid_out:
                self._laid_out.add(experiment)
                experiment.add_custom_scalars(custom_scalar_layout())

    def _start_nvml(self, trainer: Trainer, device: torch.device) -> NvmlSampler | None:
        if not self.nvml or not trainer.is_global_zero:
            return None
        if device.type != "cuda" or torch.version.hip is not None:
            self._say_once(trainer, logging.INFO, f"No GPU figures from NVML: training runs on {device.type}.")
            return None
        sampler = NvmlSampler(str(torch.cuda.get_device_properties(device).uuid))
        sampler.start()
        return sampler

    def _look_at_run(self, trainer: Trainer) -> LoopFacts:
        loaders = [loader for loader in _host.train_loaders(trainer) if hasattr(loader, "num_workers")]
        known: dict[str, Any] = {}
        if loaders:
            slowest = min(loaders, key=lambda loader: loader.num_workers)
            for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers"):
                known[name] = getattr(slowest, name, None)
        cpus = read_machine().usable_cpus // trainer.num_devices
        return LoopFacts(
            device_type=trainer.strategy.root_device.type,
            usable_cpus=max(1, cpus),
            world_size=trainer.world_size,
            **known,
        )

    def _say_once(self, trainer: Trainer, level: int, what: str) -> None:
        if what not in self._told and trainer.is_global_zero:
            logger.log(level, what)
        self._told.add(what)


def _queue(trainer: Trainer) -> int:
    """Batches that the training loaders may hold ready: workers x prefetch_factor, and the background queue."""
    ready = [
        (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0)
        + (getattr(loader, "background", 0) or 0)
        for loader in _host.train_loaders(trainer)
    ]
    return max(ready, default=0)


def _ask_loaders(trainer: Any, fit: _Fit) -> LoaderStats:
    """What the data module's caches did since the last time."""
    ask = getattr(trainer.datamodule, "cache_stats", None)
    stats = ask() if callable(ask) else None
    if not isinstance(stats, CacheStats):
        return LoaderStats()
    before, fit.cache_before = fit.cache_before, stats
    hits = stats.hits - (before.hits if before is not None else 0)
    misses = stats.misses - (before.misses if before is not None else 0)
    return LoaderStats(cache_hit_pct=100 * hits / (hits + misses) if hits + misses else None)


def _prefetch_active(trainer: Any) -> bool | None:
    """Whether a PrefetchCallback of this Trainer is at work; None: it has none."""
    found = [callback.active for callback in trainer.callbacks if isinstance(callback, PrefetchCallback)]
    return any(found) if found else None
