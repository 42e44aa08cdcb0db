"""Watches workers that the user has asked ``wrap`` to add to a training loader without workers."""

from torch.utils.data import DataLoader, IterableDataset

from lightning_feed._host import AnyTrainer
from lightning_feed.callbacks.autotune import AutotuneCallback
from lightning_feed.callbacks.tuned_loader import TunedLoader
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.settings import Setting
from lightning_feed.trials.tune_loader import Tuned

WITHOUT_WORKERS = "without_workers"
"""Attribute of a wrapped loader that holds the user's loader, to which workers were added."""


class GivenWorkers(AutotuneCallback):
    """Watches added workers as AutotuneCallback does its own, but tries nothing.

    They start anew if the hooks of the fit's first epoch change the dataset, and go if it changes within an epoch.
    """

    def _prepare(self, trainer: AnyTrainer, loader: AnyLoader) -> DataLoader[Batch] | None:
        original = getattr(loader, WITHOUT_WORKERS, None)
        if self._loaders != 1 or original is None or isinstance(original.dataset, IterableDataset):
            return None
        if self._loader is None:
            self._loader = TunedLoader(trainer, original)
            self._loader.setting = Setting.of(loader)
            self._loader.undecided = False
            own = Setting.of(original)
            self._tuned = Tuned(setting=Setting.of(loader), own=own, reason="as given", trials=(), whole=False)
        return self._loader.prepare(original)
