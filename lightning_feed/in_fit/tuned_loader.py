"""The training loader of a fit in which AutotuneCallback changes the workers, also in the middle of an epoch."""

import warnings

from torch.utils.data import DataLoader

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.in_fit.replaced_loader import (
    RestOfEpoch,
    begin_unused,
    end_workers,
    follow,
    rest_of_epoch,
    with_setting,
)
from lightning_feed.load.kinds import Batch
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import DrawsOf, size_of
from lightning_feed.load.probe import Probe
from lightning_feed.load.settings import Setting

LOOK_STEPS = 10
"""Steps of an epoch after which to look if the dataset has changed within the epoch."""


class TunedLoader:
    """Replaces the user's loader by copies with other settings. The user's loader itself stays unchanged.

    Without workers, training sees every change of the dataset at once. So where this class adds workers, it looks at a
    few samples when the workers start, and again later.

    Args:
        trainer: the Trainer of the fit.
        loader: the user's loader, as Lightning first prepared it.

    Attributes:
        original: the user's loader.
        setting: the setting in use.
        undecided: True until it is known which setting to use.
    """

    def __init__(self, trainer: AnyTrainer, loader: DataLoader[Batch]) -> None:
        self._trainer = trainer
        self.original = loader
        self.setting = Setting.of(loader)
        self.undecided = True
        self._probe: Probe | None = None
        """The samples as they were when the epoch began, or when the workers started in it."""
        self._steps = 0
        """Steps since then."""
        self._is_under_way = False
        """True from when Lightning makes the loader and its iterator until the epoch begins."""
        self._latest: DataLoader[Batch] | None = None
        """The loader that Lightning has; None before the first."""
        self._unused: list[DrawsOf] = []
        """The draws of loaders whose next pass is dropped."""
        self._iterated: DataLoader[Batch] | None = None
        """The loader that yields the rest of this epoch; None if that is the Trainer's own loader."""

    def prepare(self, loader: DataLoader[Batch]) -> DataLoader[Batch]:
        """Return a copy, with the setting in use, of the loader that the user's hook has made."""
        self._is_under_way = True
        self._begin_to_watch()
        # Trials may find more workers than CPUs to be fastest: such workers wait for something other than CPUs.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        made = with_setting(loader, self.setting)
        if self._latest is not None and loader is self.original:  # which is not iterated itself
            follow(made, self._latest)
        self._latest = made
        # Lightning takes a batch in advance from a loader without a length.
        if size_of(loader) is not None and _host.iterates_again(self._trainer):
            self._unused += begin_unused(made)
        return made

    def use_next_pass(self) -> None:
        """Note that Lightning has made its iterators, and uses those that it makes from here on."""
        while self._unused:
            self._unused.pop().is_unused = False

    def epoch_begins(self) -> None:
        """Note that the Trainer's own loader yields the epoch that begins, after all hooks of its start.

        Lightning has started the workers of a fit's first epoch before these hooks. They start anew if the program has
        changed the dataset since then.
        """
        self._iterated = None
        is_under_way = self._is_under_way
        self._is_under_way = False
        if is_under_way and self.adds_workers and self.has_changed():
            (loader,) = _host.train_loaders(self._trainer)
            rest = self._rest(loader, Setting.of(loader))
            if rest is not None:
                self._replace_rest(loader, rest)
        self._begin_to_watch()

    @property
    def adds_workers(self) -> bool:
        """True if the user's loader has no workers, and the loader in use has."""
        return self.setting.num_workers > 0 and not self.original.num_workers

    def _begin_to_watch(self) -> None:
        """Look at samples of a user's loader without workers, to compare them later."""
        self._steps = 0
        is_watched = self.adds_workers or (self.undecided and not self.original.num_workers)
        self._probe = Probe(self.original) if is_watched else None

    def step_ended(self) -> bool:
        """Count a step. Returns True once in an epoch, on all ranks alike, if it is time to look for changes."""
        self._steps += 1
        return self._steps == LOOK_STEPS and not self.original.num_workers

    def has_changed(self) -> bool:
        """Return True if the dataset has changed since the epoch began, or the workers started in it."""
        return self._probe is not None and self._probe.changed()

    def switch(self, setting: Setting) -> bool:
        """Give the loader a setting for all later epochs, and for the rest of this one if possible.

        All ranks count the steps until :meth:`step_ended` from here, also those whose loader has the setting already.

        Returns:
            True if the rest of this epoch has the setting, too. False if the order of batches does not allow it.
        """
        if setting == self.setting:
            self._steps = 0  # the samples stay those with which the workers have started
            return True
        self.setting = setting
        (loader,) = _host.train_loaders(self._trainer)
        iterated = loader if self._iterated is None else self._iterated
        self._begin_to_watch()
        rest = self._rest(iterated, setting)
        self._latest = with_setting(loader, setting)
        _host.replace_train_loader(self._trainer, self._latest)
        if rest is None:
            return False
        self._replace_rest(iterated, rest)
        return True

    def _rest(self, iterated: DataLoader[Batch], setting: Setting) -> RestOfEpoch | None:
        """Return the rest of the current epoch, loaded by new workers; None if the order of batches does not allow
        it."""
        iterators = _host.loop_iterators(self._trainer, "fit")
        if not iterators:
            return None
        return rest_of_epoch(iterated, iterators[0], setting)

    def _replace_rest(self, iterated: DataLoader[Batch], rest: RestOfEpoch) -> None:
        (iterator,) = _host.loop_iterators(self._trainer, "fit")
        _host.replace_train_iterator(self._trainer, rest.batches)
        (loader,) = _host.train_loaders(self._trainer)
        if isinstance(loader, FeedLoader) and isinstance(rest.loader, FeedLoader):
            loader.follow_rest(rest.loader)  # a checkpoint has the position of the Trainer's loader
        end_workers(iterated, iterator)
        self._iterated = rest.loader
