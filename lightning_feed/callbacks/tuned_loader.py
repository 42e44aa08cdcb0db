"""The training loader of a fit in which AutotuneCallback changes the workers, also in the middle of an epoch."""

import warnings

from torch.utils.data import DataLoader

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.load.fork_safety import plain_values
from lightning_feed.load.kinds import Batch
from lightning_feed.load.settings import Setting
from lightning_feed.trials.in_fit import RestOfEpoch, end_workers, rest_of_epoch, with_setting


class TunedLoader:
    """Replaces the user's loader by copies with other settings. The user's loader itself stays unchanged.

    Args:
        trainer: the Trainer of the fit.
        loader: the user's loader, as Lightning first prepared it.

    Attributes:
        original: the user's loader.
        setting: the setting in use.
    """

    def __init__(self, trainer: AnyTrainer, loader: DataLoader[Batch]) -> None:
        self._trainer = trainer
        self.original = loader
        self.setting = Setting.of(loader)
        self._sent_values: dict[str, object] = {}
        """Numbers and strings of the dataset when its workers started."""
        self._is_under_way = False
        """True from when Lightning makes the loader and its iterator until the epoch begins."""
        self._iterated: DataLoader[Batch] | None = None
        """The loader that yields the rest of this epoch; None if that is the Trainer's own loader."""

    def prepare(self, loader: DataLoader[Batch]) -> DataLoader[Batch]:
        """Return a copy, with the setting in use, of the loader that the user's hook has made."""
        self._sent_values = plain_values(loader.dataset)
        self._is_under_way = True
        # Trials may find more workers than CPUs to be fastest: such workers wait for something other than CPUs.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        return with_setting(loader, self.setting)

    def epoch_begins(self) -> None:
        """Note that the Trainer's own loader yields the epoch that begins."""
        self._iterated = None

    def tell_workers(self) -> None:
        """Restart the workers, which hold a copy of the dataset, if the program has changed the dataset."""
        values = plain_values(self.original.dataset)
        is_under_way = self._is_under_way
        self._is_under_way = False
        if values == self._sent_values:
            return
        (loader,) = _host.train_loaders(self._trainer)
        if is_under_way:
            if self.original.num_workers or not loader.num_workers:
                return  # the user's own workers would miss the change, too; the workers of later epochs have it
            rest = self._rest(loader, Setting.of(loader))
            if rest is None:
                return
            self._replace_rest(loader, rest)
        elif not self.original.persistent_workers and loader._iterator is not None:
            end_workers(loader)
        self._sent_values = values

    def switch(self, setting: Setting) -> bool:
        """Give the loader another setting for all later epochs, and for the rest of this one if possible.

        Returns:
            True if the rest of this epoch has the setting, too. False if the order of batches does not allow it.
        """
        self.setting = setting
        (loader,) = _host.train_loaders(self._trainer)
        iterated = loader if self._iterated is None else self._iterated
        rest = self._rest(iterated, setting)
        _host.replace_train_loader(self._trainer, with_setting(loader, setting))
        if rest is None:
            return False
        self._replace_rest(iterated, rest)
        return True

    def _rest(self, iterated: DataLoader[Batch], setting: Setting) -> RestOfEpoch | None:
        """The rest of the current epoch, loaded by new workers; None if the order of batches does not allow it."""
        iterators = _host.loop_iterators(self._trainer, "fit")
        if not iterators:
            return None
        return rest_of_epoch(iterated, iterators[0], setting)

    def _replace_rest(self, iterated: DataLoader[Batch], rest: RestOfEpoch) -> None:
        (iterator,) = _host.loop_iterators(self._trainer, "fit")
        _host.replace_train_iterator(self._trainer, rest.batches)
        end_workers(iterated, iterator)
        self._iterated = rest.loader
