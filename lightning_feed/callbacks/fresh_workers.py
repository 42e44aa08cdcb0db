"""FreshWorkers: restarts persistent workers, which hold a copy of the dataset, when the program has changed it."""

import logging
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original, Stage
from lightning_feed.load.fork_safety import plain_values
from lightning_feed.measure.guard import Guard
from lightning_feed.trials.in_fit import end_workers

logger = logging.getLogger(__name__)


class FreshWorkers(Callback):
    """Restarts persistent workers before an epoch or validation if numbers or strings of their dataset have changed.

    ``wrap`` adds this callback, because the program may have been written for loaders without workers, which see every
    change of the dataset.
    """

    def __init__(self) -> None:
        self._sent: dict[Stage, list[dict[str, object]]] = {}
        """Numbers and strings of the datasets when their workers started, by stage, in the order of the loaders."""
        self._wraps: list[_host.Wrap] = []
        self._is_first = True
        """True until a fit's first epoch begins. Lightning makes the first epoch's iterators before its hooks."""
        self._guard = Guard("wrap", self._let_go)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wraps": []}  # wraps belong to a running fit, which is neither sent nor copied

    @staticmethod
    def watch(trainer: AnyTrainer, stage: Stage, loaders: list[Any]) -> None:
        """Watch the datasets of loaders, just before Lightning makes the loaders' iterators.

        Args:
            trainer: the Trainer of the fit.
            stage: ``"fit"`` or ``"validate"``.
            loaders: all loaders of the stage.
        """
        callbacks = _host.callbacks_of(trainer)
        watching = [callback for callback in callbacks if isinstance(callback, FreshWorkers)]
        if not watching:
            watching = [FreshWorkers()]
            callbacks.insert(0, watching[0])  # first: its wraps are outside other callbacks', so they are undone first
        watching[0]._begin(trainer, stage, loaders)

    def _begin(self, trainer: AnyTrainer, stage: Stage, loaders: list[Any]) -> None:
        self._sent[stage] = _values_of(loaders)
        if not self._wraps:
            self._is_first = True
            self._wraps = [
                _host.wrap_epoch_start(trainer, partial(self._before, trainer, "fit")),
                _host.wrap_validation_start(trainer, partial(self._before, trainer, "validate")),
            ]

    def on_train_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Remove everything from the Trainer. Also ``on_exception``, after which Lightning calls no ``teardown``."""
        self._let_go()

    on_exception = teardown = on_train_end

    def _let_go(self) -> None:
        while self._wraps:
            self._wraps.pop().undo()
        self._sent = {}

    def _before(self, trainer: AnyTrainer, stage: Stage, original: Original, *args: Any) -> Any:
        self._guard.attempt("tell the workers what has changed in their dataset", self._compare, trainer, stage)
        return original(*args)

    def _compare(self, trainer: AnyTrainer, stage: Stage) -> None:
        loaders = _host.loop_loaders(trainer, stage)
        sent = self._sent.get(stage, [])
        values = _values_of(loaders)
        if len(values) != len(sent):
            return
        changed = [loader for loader, after, before in zip(loaders, values, sent, strict=True) if after != before]
        if stage == "fit" and self._is_first:
            self._is_first = False
            self._warn_of_late_changes(changed)
            return  # `_sent` stays, so workers that have missed the change are restarted before the next epoch
        for loader in changed:
            if getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None:
                end_workers(loader)
        self._sent[stage] = values

    @staticmethod
    def _warn_of_late_changes(changed: list[Any]) -> None:
        names = sorted({type(loader.dataset).__name__ for loader in changed if getattr(loader, "num_workers", 0)})
        if names:
            logger.warning(
                "The program has changed its training set (%s) as the first epoch began, but Lightning had started the "
                "workers before, so this epoch is loaded without the change. Change the training set in "
                "train_dataloader(), where trainer.current_epoch is known, or earlier.",
                ", ".join(names),
            )


def _values_of(loaders: list[Any]) -> list[dict[str, object]]:
    """Numbers and strings of the loaders' datasets."""
    return [plain_values(getattr(loader, "dataset", None)) for loader in loaders]
