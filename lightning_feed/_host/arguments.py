"""Arguments of the Trainer, its callbacks and plugins, and properties of a run that follow from them."""

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_feed._host.origin import defined_by_lightning, has_class
from lightning_feed._host.types import AnyModule, AnyTrainer

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule
    from lightning.pytorch.profilers import Profiler


def bar_refresh_rate(trainer: AnyTrainer) -> int | None:
    """Return the batches between two updates of the progress bar; None without a bar, or if the bar has no
    ``refresh_rate``."""
    rate = getattr(trainer.progress_bar_callback, "refresh_rate", None)
    return rate if type(rate) is int else None


def bar_printer(trainer: AnyTrainer) -> Callable[[str], object] | None:
    """Return the function that prints a line above a live TQDM progress bar; None if plain ``print`` is to be used.

    The bar's own function drops the line if the bar is closed or disabled. Other bars do not disturb a plain ``print``.
    Checked against Lightning 2.4.0 and 2.6.6 (``callbacks/progress/tqdm_progress.py: print``).
    """
    bar = trainer.progress_bar_callback
    live = getattr(bar, "_train_progress_bar", None)
    if bar is None or live is None or live.disable:
        return None
    return bar.print


def cli_config(trainer: AnyTrainer) -> dict[str, Any]:
    """Return the arguments of LightningCLI, by their dotted keys; empty without LightningCLI.

    The keys do not contain the subcommand. Checked against Lightning 2.4.0 and 2.6.6 (``cli.py: SaveConfigCallback``).
    """
    for callback in callbacks_of(trainer):
        if has_class(callback, "SaveConfigCallback"):
            saver: Any = callback
            return {str(key): value for key, value in saver.config.items()}
    return {}


def keep_plateaus(trainer: AnyTrainer) -> None:
    """Keep ReduceLROnPlateau schedulers from stepping: without validation, their metric may be missing.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py: _update_learning_rates``).
    """
    for config in trainer.strategy.lr_scheduler_configs:
        if config.reduce_on_plateau:
            config.frequency = sys.maxsize


def needs_metrics_every(trainer: AnyTrainer) -> set[str]:
    """Return the intervals (``"epoch"``, ``"step"``) of strict ReduceLROnPlateau schedulers.

    If the metric of such a scheduler is missing when it steps, the fit fails.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py: _update_learning_rates``).
    """
    configs = trainer.strategy.lr_scheduler_configs
    return {config.interval for config in configs if config.reduce_on_plateau and config.strict}


def takes_iterator(pl_module: AnyModule) -> bool:
    """Check if ``training_step`` takes ``dataloader_iter``, and so fetches its batches itself.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/utilities.py``).
    """
    return "dataloader_iter" in inspect.signature(pl_module.training_step).parameters


def shards_the_model(trainer: AnyTrainer) -> bool:
    """Check if the strategy shards one model across devices, as FSDP and DeepSpeed do.

    Checked against Lightning 2.4.0 and 2.6.6 (``strategies``).
    """
    return has_class(trainer.strategy, "FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")


def detects_anomalies(trainer: AnyTrainer) -> bool:
    """Check for ``Trainer(detect_anomaly=True)``.

    Checked against Lightning 2.4.0 and 2.6.6 (``trainer/trainer.py``).
    """
    return trainer._detect_anomaly


def steps_between_checkpoints(callback: object) -> int:
    """``every_n_train_steps`` of a ModelCheckpoint; 0 if it does not save by steps.

    Checked against Lightning 2.4.0 and 2.6.6 (``callbacks/model_checkpoint.py``).
    """
    return int(getattr(callback, "_every_n_train_steps", 0) or 0)


def has_grad_scaler(trainer: AnyTrainer) -> bool:
    """Check if the precision plugin scales gradients.

    Checked against Lightning 2.4.0 and 2.6.6 (``plugins/precision/amp.py``).
    """
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def optimizer_step_is_known(trainer: AnyTrainer) -> bool:
    """Return True if none of the user's classes takes part in the backward pass and the optimizer step.

    Then strategy and precision plugin are Lightning's classes, and optimizers and schedulers are torch's. Checked
    against Lightning 2.4.0 and 2.6.6 (``strategies/strategy.py``).
    """
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    of_torch = all(type(owner).__module__.startswith("torch.") for owner in [*trainer.optimizers, *schedulers])
    return of_torch and all(
        defined_by_lightning(type(plugin)) for plugin in (trainer.strategy, trainer.precision_plugin)
    )


def known_syncs(trainer: AnyTrainer) -> tuple[str, ...]:
    """Return the names of the synchronisations in a running fit that Lightning causes, from
    ``measure.measurements.SYNCS``.

    - ``prog_bar``: a progress bar is on, and a metric on the device is logged with ``prog_bar=True``. Such a metric is
      known only after it was first logged, so call this after some steps. ``ModelCheckpoint`` or the bar converts each
      metric with ``Tensor.item`` in every step. Checked against Lightning 2.4.0 and 2.6.6
      (``logger_connector/result.py: metrics``, ``utilities/metrics: convert_tensors_to_scalars``).
    - ``grad_scaler``: the precision plugin has a GradScaler.
    - ``sigterm_broadcast``: there are several ranks, and Lightning's loop broadcasts before each batch whether a
      SIGTERM came, and reads the result with ``Tensor.item``. 2.6.6 does so, 2.4.0 does not
      (``loops/training_epoch_loop.py: advance``).
    - ``throughput_monitor``: there is a ThroughputMonitor, which calls ``torch.cuda.synchronize``, on CUDA only.
      Checked against Lightning 2.4.0 and 2.6.6 (``callbacks/throughput_monitor.py: _update``).
    """
    names = []
    device_type = trainer.strategy.root_device.type
    if device_type != "cpu" and _shows_device_metrics(trainer):
        names.append("prog_bar")
    if has_grad_scaler(trainer):
        names.append("grad_scaler")
    if trainer.world_size > 1 and hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        names.append("sigterm_broadcast")
    if device_type == "cuda" and any(has_class(callback, "ThroughputMonitor") for callback in callbacks_of(trainer)):
        names.append("throughput_monitor")
    return tuple(names)


def _shows_device_metrics(trainer: AnyTrainer) -> bool:
    """Check if a live progress bar shows a metric whose value is on the device."""
    bar = trainer.progress_bar_callback
    if bar is None or not getattr(bar, "is_enabled", True):
        return False
    results = getattr(trainer.fit_loop.epoch_loop, "_results", {})
    return any(_is_in_bar(metric) for metric in results.values())


def _is_in_bar(metric: object) -> bool:
    shown = getattr(getattr(metric, "meta", None), "prog_bar", False)
    device = getattr(getattr(metric, "value", None), "device", None)
    return bool(shown) and getattr(device, "type", "cpu") != "cpu"


# --- attributes that a Trainer's connectors set, and its class does not declare -----------------------------------
# Checked against Lightning 2.4.0 and 2.6.6 (``trainer/connectors``).


def callbacks_of(trainer: AnyTrainer) -> "list[Callback]":
    """Return the Trainer's own list of callbacks, not a copy."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def profiler_of(trainer: AnyTrainer) -> "Profiler":
    """Return the Trainer's profiler, which the loops notify of their actions."""
    return trainer.profiler  # type: ignore[attr-defined, no-any-return]


def datamodule_of(trainer: AnyTrainer) -> "LightningDataModule | None":
    """Return the data module of the current or last run; None if the run has no data module."""
    return trainer.datamodule  # type: ignore[attr-defined, no-any-return]


def log_interval(trainer: AnyTrainer) -> int:
    """``Trainer(log_every_n_steps=...)``."""
    return trainer.log_every_n_steps  # type: ignore[attr-defined, no-any-return]


def reload_interval(trainer: AnyTrainer) -> int:
    """``Trainer(reload_dataloaders_every_n_epochs=...)``; 0 if the loaders are made once."""
    return trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined, no-any-return]


def is_fast_dev_run(trainer: AnyTrainer) -> bool:
    """Check for ``Trainer(fast_dev_run=...)``."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def overfits(trainer: AnyTrainer) -> bool:
    """Check for ``Trainer(overfit_batches=...)``."""
    return bool(trainer.overfit_batches > 0)  # type: ignore[attr-defined]
