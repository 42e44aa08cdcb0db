"""AutotuneCallback: finds the number of workers with which training is fastest, and sets it."""

from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original
from lightning_feed.callbacks.fit_tuning import FitTuning, TrialOptions
from lightning_feed.callbacks.starvation import GPUStarvationCallback
from lightning_feed.callbacks.starvation_run import StarvationRun
from lightning_feed.callbacks.tuning_log import Move, Outcome, TuningLog, logger
from lightning_feed.errors import SettingsError, refuses_unknown_arguments
from lightning_feed.in_fit.goal import why_fixed
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.loader_tree import walk_loaders
from lightning_feed.load.settings import MOST, Setting
from lightning_feed.measure.guard import Guard, Once, check_instance, guarded
from lightning_feed.measure.rank_store import gather
from lightning_feed.transfer.resident import ResidentLoader
from lightning_feed.trials.tune_loader import Goal, Tuned

WITHOUT_WORKERS = "without_workers"
"""Attribute of a wrapped loader that holds the user's loader, to which workers were added."""


class AutotuneCallback(Callback):
    """Finds the number of workers with which training is fastest, and sets it.

    The callback measures the first training steps. A rehearsal then sees in forked processes whether samples stay the
    same in workers; if not, the number of workers stays. It tries your setting and others in forked processes that
    imitate the steps, and continues the same epoch with the fastest setting, the start of workers in each epoch
    included. Worker processes of all others hand their batches over in place. Nothing changes unless a setting makes
    steps more than 3 % shorter, and is faster than yours in each of up to three turns, nor if steps with your setting
    take other times in trials than in training. On CUDA, batches in place are tried even if the trials gain nothing,
    because trials neither pin batches nor copy them to the device. If steps of training itself then take longer than
    before, or are less than 3 % shorter with batches in place, the callback returns to your setting. The result is
    remembered for this machine, model and data, unless other programs were busy. The next fit begins with it, and
    compares your setting once more if steps take another time than they took.

    Trials take at most a tenth of the time that is left in the fit, and a quarter of what a setting already saves.
    A fit that ends within a minute gets none, unless you set a budget.

    Samples come in the same order as without the callback. Random numbers drawn inside workers (augmentation) differ
    with the number of workers, as they do if you set it by hand. Workers start anew in each epoch, unless yours
    persist. If the program changes the dataset within an epoch, which workers cannot see, your setting returns.

    The callback works with one training loader with a map-style dataset. With streams, several loaders, loaders that
    iterate in their own way (StatefulDataLoader), datasets that refer to what processes share, or data on the device it
    does nothing, and one INFO line says so. After a failed trial the loader stays as it is.

    Args:
        max_workers: largest number of workers to try. None for as many as CPUs, memory and /dev/shm allow.
        budget_s: seconds for the rehearsal and the trials, after which none runs. None for what the fit can return, and
            at most 30.

    Raises:
        SettingsError: if ``max_workers`` is not a positive integer, or ``budget_s`` not a positive number.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_feed.callbacks.autotune import AutotuneCallback
        >>> autotune = AutotuneCallback(max_workers=8)
        >>> trainer = Trainer(callbacks=[autotune], logger=False, accelerator="cpu")
        >>> autotune.moves
        ()
    """

    @refuses_unknown_arguments
    def __init__(self, max_workers: int | None = None, *, budget_s: float | None = None) -> None:
        if max_workers is not None and (type(max_workers) is not int or not 1 <= max_workers <= MOST):
            raise SettingsError(
                f"AutotuneCallback(max_workers={max_workers!r}): give the largest number of workers, a whole number "
                f"from 1 to {MOST}, or leave it out to let CPUs and memory decide."
            )
        if budget_s is not None:
            Goal(budget_s=budget_s)  # raises if it is not a valid budget
        self.max_workers = max_workers
        self.budget_s = budget_s
        self._once = Once(logger)
        self._guard = self._new_guard()
        self._wraps: list[_host.Wrap] = []
        self._loaders = 1
        """Number of training loaders."""
        self._tuning: FitTuning | None = None
        """The tuning of this fit, once Lightning has made its loader; None if the loader is left alone."""
        self._run: StarvationRun | None = None
        """This callback's own measurement; None if there is nothing to measure, or a GPUStarvationCallback measures."""
        self._outcome = Outcome()

    def _new_guard(self) -> Guard:
        return Guard("AutotuneCallback", self._stop_measuring)

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners, but a running fit cannot be.
        return {**self.__dict__, "_run": None, "_wraps": [], "_tuning": None}

    @property
    def moves(self) -> tuple[Move, ...]:
        """Changes of this fit or the last one, in order."""
        return tuple(self._outcome.moves)

    @property
    def decided(self) -> bool:
        """True once this fit's number of workers is known to stay: after trials, or because nothing may be changed."""
        return self._outcome.decided

    # --- hooks --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare to replace the training loader that Lightning makes for this fit."""
        if stage == "fit":
            self._guard = self._new_guard()
            self._guard.measure(self._begin, trainer)

    def _begin(self, trainer: AnyTrainer) -> None:
        self._let_go()
        self._loaders = 1
        self._outcome = Outcome()
        first = next(callback for callback in _host.callbacks_of(trainer) if isinstance(callback, AutotuneCallback))
        if _host.is_fast_dev_run(trainer):
            self._log(trainer).does_nothing("this is a fast_dev_run")
        elif first is not self:
            self._log(trainer).does_nothing("another AutotuneCallback is at work")
        else:
            self._wraps = [
                _host.wrap_train_source(trainer, self._count),
                _host.wrap_train_set_up(trainer, self._set_up),
                _host.Wrap(trainer.strategy, "process_dataloader", partial(self._process, trainer)),
                _host.wrap_epoch_start(trainer, self._begin_epoch),
            ]

    def _log(self, trainer: AnyTrainer) -> TuningLog:
        return TuningLog(trainer, self._guard, self._once, self._outcome)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring if trials are to come and no GPUStarvationCallback measures."""
        self._guard.measure(self._start_measuring, trainer)

    def _start_measuring(self, trainer: AnyTrainer) -> None:
        if self._tuning is None or not self._tuning.measures_steps:
            return
        if not _starvation_callbacks(trainer):
            self._run = StarvationRun(trainer, guard=self._guard)
            self._run.start()

    def _stop_measuring(self) -> None:
        run = self._run
        self._run = None
        if run is not None:
            run.close()

    @guarded
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch of this callback's own measurement. Trials that waited for this epoch run after some steps."""
        if self._run is not None:
            self._run.epoch_began()
        run = self._run or _run_of_another_callback(trainer)
        if self._tuning is not None and run is not None:
            self._tuning.epoch_began(run)

    @guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Note the batch if this callback does its own measuring."""
        if self._run is not None:
            self._run.batch_came(batch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Count the step. Once enough steps are measured, run the trials, or check their result."""
        tuning = self._tuning
        if tuning is None:
            return
        if tuning.loader.step_ended():
            self._guard.measure(tuning.look_for_changes)
        if tuning.measures_steps:
            self._guard.measure(self._measure_step, trainer, tuning)
        if self._run is not None and not tuning.measures_steps:
            self._stop_measuring()

    def _measure_step(self, trainer: AnyTrainer, tuning: FitTuning) -> None:
        if self._run is not None:
            self._run.step_ended()
        run = self._run or _run_of_another_callback(trainer)
        if run is not None:
            tuning.step_ended(run)

    @guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the training step that contains this validation."""
        if self._run is not None:
            self._run.validation_began()

    def on_train_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Remove everything from the Trainer. Also runs as ``on_exception``, which no ``teardown`` follows."""
        check_instance(self, AutotuneCallback)
        self._guard.attempt("take out what it had put in", self._let_go)

    on_exception = teardown = on_train_end

    def _let_go(self) -> None:
        while self._wraps:
            self._wraps.pop().undo()
        self._tuning = None
        self._stop_measuring()

    # --- when the loader is made --------------------------------------------------------------------------------------

    def _count(self, original: Original) -> Any:
        structure = original()
        self._loaders = len(walk_loaders(structure))
        return structure

    def _set_up(self, original: Original) -> Any:
        try:
            return original()
        finally:
            if self._tuning is not None:
                self._tuning.loader.use_next_pass()

    def _process(self, trainer: AnyTrainer, original: Original, loader: object) -> Any:
        """Return the loader for Lightning to train with in place of the user's."""
        if trainer.training:
            prepared = self._guard.attempt("prepare the training loader", self._prepare, trainer, loader)
            loader = loader if prepared is None else prepared
        return original(loader)

    def _prepare(self, trainer: AnyTrainer, loader: AnyLoader) -> DataLoader[Batch] | None:
        """Return a copy of a training loader with the setting in use; None if the loader is left alone."""
        if self._tuning is None:
            self._tuning = self._begin_tuning(trainer, loader)
        if self._tuning is None:
            return None
        return self._tuning.loader.prepare(loader)

    def _begin_tuning(self, trainer: AnyTrainer, loader: AnyLoader) -> FitTuning | None:
        """Begin with the result of an earlier run, or with the user's setting. Returns None if nothing may change."""
        why_not = next(
            filter(None, gather(trainer, _why_not(self._loaders, loader))), ""
        )  # so that all ranks try, or none
        if not why_not:
            tuning = self._tuning_of(trainer, loader)
            why_not = tuning.recall()
            if not why_not:
                return tuning
        self._log(trainer).does_nothing(why_not)
        return None

    def _tuning_of(self, trainer: AnyTrainer, loader: DataLoader[Batch]) -> FitTuning:
        options = TrialOptions(max_workers=self.max_workers, budget_s=self.budget_s)
        return FitTuning(trainer, loader, options, self._guard, self._log(trainer))

    def _begin_epoch(self, original: Original, *args: Any) -> Any:
        if self._tuning is not None:
            self._guard.measure(self._tuning.loader.epoch_begins)
        return original(*args)


def _starvation_callbacks(trainer: AnyTrainer) -> list[GPUStarvationCallback]:
    return [callback for callback in _host.callbacks_of(trainer) if isinstance(callback, GPUStarvationCallback)]


def _run_of_another_callback(trainer: AnyTrainer) -> StarvationRun | None:
    """Return the run that a GPUStarvationCallback measures; None if there is none."""
    for callback in _starvation_callbacks(trainer):
        return callback.measured_fit
    return None


def _why_not(loaders: int, loader: object) -> str:
    """Return the reason why a fit's loader is left alone, known without a rehearsal; empty if none is.

    Args:
        loaders: number of training loaders.
        loader: one of them.
    """
    if loaders != 1:
        return f"there are {loaders} training loaders"
    if isinstance(loader, ResidentLoader):
        return "the training set is on the device, so there is nothing to load"
    if not isinstance(loader, DataLoader):
        return f"the training loader ({type(loader).__name__}) is not a DataLoader"
    return why_fixed(loader)


class GivenWorkers(AutotuneCallback):
    """Watches workers that the user has asked ``wrap`` to add to a training loader without workers. Tries nothing.

    They start anew if the hooks of the fit's first epoch change the dataset, and go if it changes within an epoch.
    """

    def _prepare(self, trainer: AnyTrainer, loader: AnyLoader) -> DataLoader[Batch] | None:
        original = getattr(loader, WITHOUT_WORKERS, None)
        if self._loaders != 1 or original is None or isinstance(original.dataset, IterableDataset):
            return None
        if self._tuning is None:
            own = Setting.of(original)
            given = Tuned(setting=Setting.of(loader), own=own, reason="as given", trials=(), whole=False)
            self._tuning = self._tuning_of(trainer, original)
            self._tuning.use(given)
        return self._tuning.loader.prepare(original)
