"""Where the trainer and its loops stand."""

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from lightning_feed.errors import SettingsError

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def package_of(first: Any, *others: Any) -> ModuleType:
    """The package that a Trainer, a module or a data module comes from: ``lightning.pytorch`` or ``pytorch_lightning``.

    Raises:
        SettingsError: when it comes from neither, or ``others`` come from another: each takes nothing of the other.
    """
    found = [PACKAGES[top] for base in type(first).__mro__ if (top := base.__module__.partition(".")[0]) in PACKAGES]
    if not found:
        raise SettingsError(
            f"{type(first).__module__}.{type(first).__qualname__} comes from neither lightning.pytorch nor "
            "pytorch_lightning. Give a Trainer, a LightningModule and a LightningDataModule of one of them."
        )
    for other in others:
        if package_of(other).__name__ != found[0]:
            raise SettingsError(
                f"{type(first).__name__} comes from {found[0]} and {type(other).__name__} from "
                f"{package_of(other).__name__}, and neither package takes what is of the other. Import both from one."
            )
    return import_module(found[0])


def epochs_processed(trainer: Any) -> int:
    """Training epochs that were trained to their end, which is the number of the epoch to train now.

    Lightning gives this number to ``sampler.set_epoch``. ``trainer.current_epoch`` is behind it on a resumed run until
    the fit loop starts. Read in 2.4.0 and 2.6.6 (``loops/fit_loop.py: on_advance_start``).
    """
    return int(trainer.fit_loop.epoch_progress.current.processed)


def ranks_that_share_samples(trainer: Any) -> int:
    """Among how many ranks Lightning divides the samples of a map-style dataset.

    Read in 2.4.0 and 2.6.6 (``connectors/data_connector.py: _requires_distributed_sampler``).
    """
    connector = trainer._accelerator_connector
    return int(trainer.world_size) if connector.use_distributed_sampler and connector.is_distributed else 1


def live_fetcher(trainer: Any) -> Any:
    """The fetcher of the loop that runs now, or None before it exists. Read in 2.4.0, 2.5.6 and 2.6.6."""
    known = trainer.training or trainer.sanity_checking or trainer.validating or trainer.testing or trainer.predicting
    return _loop_of(trainer, stage_now(trainer))._data_fetcher if known else None


def stage_now(trainer: Any) -> str:
    """What the running loop does: ``"fit"``, ``"validate"`` (within a fit too), ``"test"`` or ``"predict"``."""
    if trainer.training:
        return "fit"
    if trainer.sanity_checking or trainer.validating:
        return "validate"
    return "test" if trainer.testing else "predict"


def _loop_of(trainer: Any, stage: str) -> Any:
    """The loop of a stage, as :func:`stage_now` names them. Read in 2.4.0, 2.5.6 and 2.6.6 (``trainer/trainer.py``)."""
    if stage == "validate" and trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return getattr(trainer, f"{stage}_loop")


def loop_loaders(trainer: Any, stage: str) -> list[Any]:
    """The loaders of a stage, flattened. Read in 2.4.0 and 2.6.6 (``setup_data`` of each loop)."""
    combined = _loop_of(trainer, stage)._combined_loader
    return [] if combined is None else list(combined.flattened)


def train_loaders(trainer: Any) -> list[Any]:
    """The training loaders, flattened."""
    return loop_loaders(trainer, "fit")


def loader_names(trainer: Any, stage: str) -> list[str]:
    """What to call the loaders of a stage: keys of a dict, else as Lightning names them in metrics.

    Read in 2.4.0 and 2.6.6 (``utilities/combined_loader.py``).
    """
    loaders = loop_loaders(trainer, stage)
    given = getattr(_loop_of(trainer, stage)._combined_loader, "iterables", None)
    if isinstance(given, dict) and [*map(id, given.values())] == [*map(id, loaders)]:
        return [str(key) for key in given]
    return [f"dataloader_idx_{index}" for index in range(len(loaders))]


def loop_iterators(trainer: Any, stage: str) -> list[Any]:
    """The iterators that the batches of a stage come from now, one for each loader of the mode; empty outside of it.

    A mode may make others within an epoch: ``max_size_cycle`` makes a new one when a loader is at its end, and
    ``sequential`` goes on to the next loader. The class of the fetcher does not matter, so it may be one that
    PrefetchCallback has adopted. Read in 2.4.0 and 2.6.6 (``loops/fetchers.py: _DataFetcher``,
    ``utilities/combined_loader.py: _ModeIterator``).
    """
    combined = getattr(_loop_of(trainer, stage)._data_fetcher, "_combined_loader", None)
    return list(getattr(getattr(combined, "_iterator", None), "iterators", None) or ())


def batches_of(trainer: Any, stage: str) -> int | None:
    """Batches of an epoch of a stage, those of all loaders; None for an endless one.

    Read in 2.4.0 and 2.6.6 (``loops/evaluation_loop.py: max_batches``).
    """
    every = trainer.num_training_batches if stage == "fit" else sum(_loop_of(trainer, stage).max_batches)
    return None if every == float("inf") else int(every)


def train_fetcher(trainer: Any) -> Any:
    """The training loop's fetcher, or None outside of a fit. Read in 2.4.0, 2.5.6 and 2.6.6."""
    return trainer.fit_loop._data_fetcher


def train_progress(trainer: Any) -> Any:
    """The training loop's count of its batches. Read in 2.4.0 and 2.6.6 (``loops/progress.py: _BatchProgress``)."""
    return trainer.fit_loop.epoch_loop.batch_progress


def read_already(trainer: Any) -> bool:
    """Whether Lightning has drawn a batch that no step was given yet, as it does for loaders without a length."""
    return bool(trainer.fit_loop._data_fetcher.batches)


def train_batches_to_follow(trainer: Any, *, at_most: int, step_pending: bool) -> int:
    """How many batches the training loop will surely go straight on to after this one, up to ``at_most``.

    None when the run ends here, and none when validation comes first: what validation draws from the global random
    generators would otherwise come after the next training batch was loaded, not before.

    Args:
        at_most: the answer is not looked for beyond it.
        step_pending: the optimizer step of this batch is still to come, so the step count is one behind.

    Read in 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``).
    """
    loop = trainer.fit_loop.epoch_loop
    if trainer.should_stop or loop.batch_progress.is_last_batch:
        return 0
    if trainer.max_steps != -1:
        at_most = min(at_most, trainer.max_steps - trainer.global_step - step_pending)
    if at_most <= 0 or loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        return 0
    every = trainer.val_check_batch
    if every not in (None, float("inf")) and loop._should_check_val_epoch():
        done = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
        at_most = min(at_most, int(every - (done + 1) % every))
    return at_most


def change_saved_arguments(loader: Any, changed: dict[str, Any], *, always: tuple[str, ...]) -> None:
    """Change the arguments that Lightning saw when a loader was made in a hook.

    With them it makes the loader anew where it needs another sampler. Of those that were not given, ``always`` names
    the ones that are added where the constructor takes them. Read in 2.4.0 and 2.6.6
    (``fabric/utilities/data.py: _wrap_dataloader_init``).
    """
    kept = vars(loader)
    if "__pl_saved_kwargs" not in kept:
        return
    names, values = list(kept["__pl_saved_arg_names"]), list(kept["__pl_saved_args"])
    saved = dict(kept["__pl_saved_kwargs"])
    constructor: Any = inspect.unwrap(type(loader).__init__)
    parameters = inspect.signature(constructor).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name, value in changed.items():
        if name in names:
            values[names.index(name)] = value
        elif name in saved or (name in always and (takes_all or name in parameters)):
            saved[name] = value
    kept["__pl_saved_args"], kept["__pl_saved_kwargs"] = tuple(values), saved


def train_loader_source(trainer: Any) -> Any:
    """The module or data module whose ``train_dataloader`` gives the loaders; None where ``trainer.fit`` got them.

    Read in 2.4.0 and 2.6.6 (``connectors/data_connector.py: _DataLoaderSource``).
    """
    source = trainer.fit_loop._data_source
    return source.instance if source.is_module() else None


def bar_refresh_rate(trainer: Any) -> int | None:
    """Batches between two drawings of the progress bar; None: there is none, or it is of another kind."""
    rate = getattr(trainer.progress_bar_callback, "refresh_rate", None)
    return rate if type(rate) is int else None


def cli_config(trainer: Any) -> dict[str, Any]:
    """The arguments that LightningCLI was called with, by their dotted keys; empty without one.

    Read in 2.4.0 and 2.6.6 (``cli.py: SaveConfigCallback``), which has them without the name of the subcommand.
    """
    for callback in trainer.callbacks:
        if any(kind.__name__ == "SaveConfigCallback" for kind in type(callback).__mro__):
            return {str(key): value for key, value in callback.config.items()}
    return {}


def checkpoint_loader_states(checkpoint: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The training loaders' states in a checkpoint.

    Read in 2.4.0 and 2.6.6 (``loops/fit_loop.py: on_save_checkpoint``).
    """
    states: list[dict[str, Any]] | None = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    return states


def write_loader_states(checkpoint: dict[str, Any], states: list[dict[str, Any]]) -> None:
    """Put ``states`` in the place of those that Lightning took; none at all where nothing was trained yet."""
    fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    if states:
        fit_loop["combined_loader"] = states
    else:
        fit_loop.pop("combined_loader", None)


def resumes_in_a_new_epoch(trainer: Any, checkpoint: dict[str, Any]) -> bool:
    """Whether a run resumed from ``checkpoint`` starts a new epoch with the loader states that it loads.

    It does when the last batch of an epoch had been trained. Lightning gives the loaders their states then too, but no
    new ``iter()``: a loader that goes on from there has nothing left, and the new epoch would be empty. Read in 2.6.6
    (``loops/training_epoch_loop.py: reset``).
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current = progress["current"]
    if not progress["is_last_batch"] or current["ready"] != current["processed"]:
        return False
    return current["completed"] == current["processed"] or _counts_the_batch_in_hand(trainer)


def count_the_batch_in_hand(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Let an older Lightning know that a batch was trained whose ``on_train_batch_end`` was still running.

    ``ModelCheckpoint(every_n_train_steps=...)`` saves there. 2.6.6 counts that batch, and 2.4.0 would train one more in
    its place. The epoch is ended too where it was the last batch, as 2.6.6 does (``loops/fit_loop.py: reset``).
    """
    if _counts_the_batch_in_hand(trainer):
        return
    fit_loop = checkpoint["loops"]["fit_loop"]
    progress = fit_loop["epoch_loop.batch_progress"]
    current = progress["current"]
    if current["ready"] > current["processed"]:
        progress["is_last_batch"] = False  # it is to be trained again, and 2.4.0 would take the epoch as ended
    if not current["ready"] == current["processed"] == current["completed"] + 1:
        return
    for part in (current, progress["total"]):
        part["completed"] += 1
    if progress["is_last_batch"]:
        for part in fit_loop["epoch_progress"].values():
            part["processed"] += 1
            part["completed"] += 1
        current.update(dict.fromkeys(current, 0))
        progress["is_last_batch"] = False


def shift_batches(trainer: Any, shift: int) -> None:
    """Add ``shift`` to the batches of the resumed epoch: its loader makes others of the same samples.

    To be called in ``on_train_start``, before the loop compares them with the loader's length. Read in 2.4.0 and 2.6.6
    (``loops/training_epoch_loop.py: on_run_start``).
    """
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + shift)


def _counts_the_batch_in_hand(trainer: Any) -> bool:
    return hasattr(trainer.fit_loop.epoch_loop, "restarted_on_train_batch_end")


def go_on_past_the_end(trainer: Any) -> None:
    """Let the training loop ignore ``max_epochs`` and ``max_steps`` from now on.

    What the optimizers and schedulers were told of them when they were made stays. Read in 2.4.0 and 2.6.6
    (``loops/fit_loop.py: done``, ``loops/training_epoch_loop.py: _is_training_done``).
    """
    trainer.fit_loop.max_epochs = -1
    trainer.fit_loop.epoch_loop.max_steps = -1


def keep_plateaus(trainer: Any) -> None:
    """Leave the learning rates that follow a metric as they are: without validation there may be no such metric.

    Read in 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py: _update_learning_rates``).
    """
    for config in trainer.strategy.lr_scheduler_configs:
        if config.reduce_on_plateau:
            config.frequency = sys.maxsize


def needs_metrics_every(trainer: Any) -> set[str]:
    """``"epoch"`` and ``"step"``, where a learning rate follows a metric and the fit fails without one by then.

    Read in 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py: _update_learning_rates``).
    """
    configs = trainer.strategy.lr_scheduler_configs
    return {config.interval for config in configs if config.reduce_on_plateau and config.strict}


def takes_iterator(pl_module: Any) -> bool:
    """Whether ``training_step`` fetches for itself. Read in 2.4.0 and 2.6.6 (``loops/utilities.py``)."""
    return "dataloader_iter" in inspect.signature(pl_module.training_step).parameters


def is_training(trainer: Any) -> bool:
    """Whether one of the Trainer's loops runs now. Read in 2.4.0 and 2.6.6 (``trainer/states.py``)."""
    return str(getattr(trainer.state.status, "value", trainer.state.status)) == "running"


def shards_the_model(trainer: Any) -> bool:
    """Whether the strategy divides one model among devices. Read in 2.4.0 and 2.6.6 (``strategies``)."""
    names = {base.__name__ for base in type(trainer.strategy).__mro__}
    return bool(names & {"FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy"})


def detects_anomalies(trainer: Any) -> bool:
    """Whether ``Trainer(detect_anomaly=True)``. Read in 2.4.0 and 2.6.6 (``trainer/trainer.py``)."""
    return bool(getattr(trainer, "_detect_anomaly", False))


def steps_between_checkpoints(callback: Any) -> int:
    """Of a ModelCheckpoint; 0: it goes by epochs. Read in 2.4.0 and 2.6.6 (``callbacks/model_checkpoint.py``)."""
    return int(getattr(callback, "_every_n_train_steps", 0) or 0)
