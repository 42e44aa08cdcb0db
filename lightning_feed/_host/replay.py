"""A short fit beside the user's own: how long it goes on, and what its step is given."""

import inspect
import sys
from typing import Any


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
