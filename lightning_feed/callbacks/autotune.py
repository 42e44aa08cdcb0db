"""AutotuneCallback: finds the number of workers by short trials when training begins."""

import logging
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original
from lightning_feed.callbacks.starvation import GPUStarvationCallback
from lightning_feed.callbacks.starvation_run import StarvationRun
from lightning_feed.errors import SettingsError, throughput
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.rank_store import gather
from lightning_feed.load.settings import MOST
from lightning_feed.measure.guard import Guard, Once, check_instance, guarded, say
from lightning_feed.measure.loop import LoopSums
from lightning_feed.transfer.resident import ResidentLoader
from lightning_feed.trials.background import BackgroundLoader, BackgroundTrial, taken_by, why_not_in_background
from lightning_feed.trials.cloning import map_loaders
from lightning_feed.trials.in_fit import end_workers, goal_of, setting_of, tune_for_fit, why_fixed, with_setting
from lightning_feed.trials.search import Goal, Tuned
from lightning_feed.trials.trial import Setting
from lightning_feed.trials.tune_loader import remember

logger = logging.getLogger(__name__)

STARVED_PCT = 5.0
"""Training is starved if it waits for data for at least this share of step time. TensorFlow's input-pipeline analyzer
has the same threshold."""
LATE = 0.2
"""A loader is late if batches take this share longer than in the trials: twice the spread of the trials' rates."""
WORSE = 0.05
"""Steps longer by this share are worse. Epochs with the same settings can differ by less than that."""
FEWEST_STEPS = 20
"""Fewest steps needed for a comparison."""
_SET = ("num_workers", "prefetch_factor", "persistent_workers")


@dataclass(frozen=True, kw_only=True)
class Move:
    """A change of the training loader."""

    epoch: int
    """First epoch with the change, as the Trainer counts."""
    num_workers: int
    prefetch_factor: int | None
    """None without workers."""
    persistent_workers: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class EpochFigures:
    """Means over one rank's steps since the last decision."""

    step_ms: float
    data_idle_ms: float
    """Time per step spent waiting for data."""
    late: bool
    """True if training is starved, and batches take longer than in the trials."""


class AutotuneCallback(Callback):
    """Finds the best number of workers for the training loader by short trials when training begins, and sets it.

    It tries your setting and a few others on copies of the loader, and takes the fastest. Your setting stays if it is
    within 10 % of the fastest. Otherwise ``num_workers``, ``prefetch_factor`` and ``persistent_workers`` are set on a
    copy, one line says so, and the result is remembered for this machine and data. If an epoch is starved although the
    trials promised otherwise, the callback goes back to your setting for an epoch, and keeps the one with the shorter
    steps.

    For a training loader that is not a DataLoader, such as a generator, it tries a background thread in the first steps
    instead, unless that loader draws from the model's random generators.

    Samples come in the same order as without the callback. Random numbers drawn inside workers (augmentation) differ
    with the number of workers, as they do if you set it by hand.

    It serves one training loader with a map-style dataset. With iterable datasets, several loaders, loaders that
    iterate in their own way (StatefulDataLoader), or data on the device it does nothing, and says so. After a failed
    trial the loader stays as it is.

    Args:
        max_workers: largest number of workers to try; None: as many as CPUs, memory and /dev/shm allow.
        budget_s: seconds for the trials. No trial starts later.

    Raises:
        SettingsError: when ``max_workers`` is not a positive integer, or ``budget_s`` not a positive number.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_feed.callbacks.autotune import AutotuneCallback
        >>> autotune = AutotuneCallback(max_workers=8)
        >>> trainer = Trainer(callbacks=[autotune], logger=False, accelerator="cpu")
        >>> autotune.moves
        ()
    """

    def __init__(self, max_workers: int | None = None, *, budget_s: float = 10.0) -> None:
        whole = isinstance(max_workers, int) and not isinstance(max_workers, bool)
        if max_workers is not None and (not whole or not 1 <= max_workers <= MOST):
            raise SettingsError(
                f"AutotuneCallback(max_workers={max_workers!r}): give the most workers that it may use, a whole number "
                f"from 1 to {MOST}, or leave it out to let CPUs and memory decide."
            )
        Goal(budget_s=budget_s)  # raises if it is not a valid budget
        self.max_workers = max_workers
        self.budget_s = budget_s
        self._once = Once(logger)
        self._guard = self._new_guard()
        self._wraps: list[_host.Wrap] = []
        self._run: StarvationRun | None = None
        self._forget()

    def _new_guard(self) -> Guard:
        return Guard("AutotuneCallback", self._stop_measuring)

    def _forget(self) -> None:
        self._moves: list[Move] = []
        self._loader: DataLoader[Batch] | None = None
        """The user's loader, as Lightning first prepared it."""
        self._background: BackgroundLoader | None = None
        """The user's loader if it is not a DataLoader, with a thread that may draw from it."""
        self._goal: Goal | None = None
        self._tuned: Tuned | None = None
        self._now: Setting | None = None
        """The current setting; None if the user's loader is unchanged."""
        self._loaders = 1
        self._epochs = 0
        self._over = True
        self._sums: LoopSums | None = None
        self._decided: LoopSums | None = None
        """The sums at the end of the last epoch, and at the last decision."""
        self._taken_back: EpochFigures | None = None
        """The figures that made us revert the found setting; None while it is in use."""

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners. A running fit can be neither.
        return {**self.__dict__, "_run": None, "_wraps": [], "_loader": None, "_background": None}

    @property
    def moves(self) -> tuple[Move, ...]:
        """Changes of this fit or the last one, in order."""
        return tuple(self._moves)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for the training loader."""
        if stage == "fit":
            self._guard = self._new_guard()
            self._guard.measure(self._begin, trainer)

    def _begin(self, trainer: AnyTrainer) -> None:
        self._let_go()
        self._forget()
        first = next(one for one in trainer.callbacks if isinstance(one, AutotuneCallback))
        if trainer.fast_dev_run:
            self._do_nothing(trainer, "this is a fast_dev_run")
        elif first is not self:
            self._do_nothing(trainer, "another AutotuneCallback is at work")
        else:
            self._wraps = [
                _host.wrap_train_source(trainer, self._count),
                _host.Wrap(trainer.strategy, "process_dataloader", partial(self._process, trainer)),
            ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring if there are settings to compare."""
        self._guard.measure(self._start_measuring, trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the last epoch with what the trials promised, before Lightning begins its next pass."""
        if self._run is not None:
            self._guard.measure(self._run.epoch_began)
        if self._epochs and not self._over:
            mine = self._guard.measure(self._figures, trainer)  # also on a rank that has failed: the others wait for it
            every = self._guard.attempt("ask the other ranks", gather, trainer, mine)
            self._guard.measure(self._compare, trainer, every)

    @guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Note the batch, if this callback does its own measuring."""
        if self._run is not None:
            self._run.batch_came(batch)

    @guarded
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Count the step, if this callback does its own measuring."""
        if self._run is not None:
            self._run.step_ended()

    @guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the training step that contains this validation."""
        if self._run is not None:
            self._run.validation_began()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that figures are available."""
        self._epochs += 1

    def on_train_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Remove everything from the Trainer. Lightning does not call ``teardown`` after an exception."""
        check_instance(self, AutotuneCallback)
        self._guard.attempt("take out what it had put in", self._let_go)

    on_exception = teardown = on_train_end

    def _let_go(self) -> None:
        while self._wraps:
            self._wraps.pop().undo()
        if self._background is not None:
            self._background.close()
            self._background = None
        self._stop_measuring()

    # --- when the loader is made --------------------------------------------------------------------------------------

    def _count(self, original: Original) -> Any:
        made = original()
        found: list[Any] = []
        map_loaders(made, lambda loader, _: found.append(loader))
        self._loaders = len(found)
        return made

    def _process(self, trainer: AnyTrainer, original: Original, loader: object) -> Any:
        """Return the loader for Lightning to train with in place of the user's."""
        if trainer.training:
            tuned = self._guard.attempt("tune the training loader", self._tune, trainer, loader)
            loader = loader if tuned is None else tuned
        return original(loader)

    def _tune(self, trainer: object, loader: AnyLoader) -> Any:
        """The tuned copy of a training loader; None if the loader is kept."""
        if not isinstance(loader, DataLoader):
            return self._in_background(trainer, loader)
        if self._loader is None:
            self._loader = loader
            self._find(trainer, loader)
        if self._now is None:
            return None
        # If trials found more workers than CPUs to be fastest, the workers wait for something else.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        return with_setting(loader, self._now)

    def _find(self, trainer: AnyTrainer, loader: AnyLoader) -> None:
        every = gather(trainer, self._why_not(loader))  # so that all ranks try, or none
        why_not = next(filter(None, every), "")
        if why_not:
            self._do_nothing(trainer, why_not)
            return
        own = setting_of(loader)
        allowed = self.max_workers is None or own.num_workers <= self.max_workers
        self._goal = goal_of(
            trainer, loader, budget_s=self.budget_s, most_workers=self.max_workers, given=own if allowed else None
        )
        self._tuned = tune_for_fit(loader, trainer, "train", self._goal)
        if self._tuned is None:
            return
        found = self._tuned.setting
        self._over = found == own and trainer.world_size == 1
        if found == own:
            self._say(trainer, f"AutotuneCallback keeps {own}: {self._tuned.reason}.")
            return
        rate = throughput(self._tuned.batches_per_s or 0.0, self._tuned.batch_size)
        self._change(trainer, own, found, f"{self._tuned.reason} ({rate})")

    def _in_background(self, trainer: AnyTrainer, loader: AnyLoader) -> BackgroundLoader | None:
        """Wrap a loader that is not a DataLoader, so that a thread can draw from it; None if it stays as it is."""
        why_not = self._why_not(loader)
        if why_not:
            self._do_nothing(trainer, why_not)
            return None
        if self._background is None:
            name = f"the training loader ({type(loader).__name__})"
            trial = BackgroundTrial(name, lambda line: self._say(trainer, f"AutotuneCallback {line}"))
        else:
            self._background.close()
            trial = self._background.trial
        self._background = BackgroundLoader(loader, trial, limit=partial(taken_by, trainer))
        return self._background

    def _why_not(self, loader: object) -> str:
        if self._loaders != 1:
            return f"there are {self._loaders} training loaders, and the wait is not measured for each of them"
        if isinstance(loader, ResidentLoader):
            return "the training set is on the device, so there is nothing to load"
        return why_fixed(loader) if isinstance(loader, DataLoader) else why_not_in_background(loader)

    # --- between epochs -----------------------------------------------------------------------------------------------

    def _start_measuring(self, trainer: AnyTrainer) -> None:
        if self._now is not None:
            self._log(trainer)
        if not self._over and not any(isinstance(one, GPUStarvationCallback) for one in trainer.callbacks):
            self._run = StarvationRun(trainer, every=0, guard=self._guard)

    def _stop_measuring(self) -> None:
        run = self._run
        self._run = None
        if run is not None:
            run.close()

    def _figures(self, trainer: AnyTrainer) -> EpochFigures | None:
        """Figures since the last decision; None for too few steps."""
        beside = (one.measured_fit for one in trainer.callbacks if isinstance(one, GPUStarvationCallback))
        run = self._run or next((run for run in beside if run is not None), None)
        self._sums = run.settled() if run is not None else None
        if self._sums is None or self._tuned is None or self._loader is None:
            return None
        sums = self._sums - self._decided if self._decided is not None else self._sums
        stats = sums.steps.stats(settled=True, trusted_clock=True, prefetch_active=None)
        if stats.steps < FEWEST_STEPS or stats.step_ms is None or stats.data_idle_ms is None:
            return None
        own = setting_of(self._loader)
        late = is_late(self._tuned, own, step_ms=stats.step_ms, data_idle_ms=stats.data_idle_ms)
        return EpochFigures(step_ms=stats.step_ms, data_idle_ms=stats.data_idle_ms, late=late)

    def _compare(self, trainer: AnyTrainer, every: list[EpochFigures | None] | None) -> None:
        """Revert a setting that performs worse than promised; then keep the better of the two."""
        known = [one for one in every or [] if one is not None]
        if every is None or len(known) < len(every):
            self._over = every is None
            return
        assert self._tuned is not None
        assert self._loader is not None
        assert self._goal is not None
        self._decided = self._sums
        own = setting_of(self._loader)
        found = self._tuned.setting
        if self._taken_back is None:
            self._take_back(trainer, max(known, key=lambda one: (one.late, one.step_ms)), self._tuned, own)
            return
        self._over = True
        before = self._taken_back.step_ms
        after = max(one.step_ms for one in known)
        if after > before * (1 + WORSE):
            self._change(trainer, own, found, f"without it steps took {after:.3g} ms, with it {before:.3g}")
            return
        why = f"steps take {after:.3g} ms, and took {before:.3g} with {found}"
        self._say(trainer, f"AutotuneCallback keeps {own}: {why}.")
        if trainer.local_rank == 0:
            self._guard.attempt("remember it", remember, self._loader, self._goal, self._tuned, own)

    def _take_back(self, trainer: object, worst: EpochFigures, tuned: Tuned, own: Setting) -> None:
        if worst.late:
            self._taken_back = worst
            promised = 1e3 / (tuned.batches_per_s or 1.0)
            waited = f"steps took {worst.step_ms:.3g} ms, {worst.data_idle_ms:.3g} of them waiting"
            why = f"{waited}, and the trials promised a batch every {promised:.3g} ms"
            self._change(trainer, tuned.setting, own, why)

    def _change(self, trainer: AnyTrainer, before: Setting, now: Setting, why: str) -> None:
        self._now = now
        epoch = trainer.current_epoch
        changed = {name: getattr(now, name) for name in _SET}
        self._moves.append(Move(epoch=epoch, **changed, reason=why))
        same = "" if self._epochs else " The order of samples stays; random numbers drawn inside workers differ."
        self._say(trainer, f"AutotuneCallback, epoch {epoch}: {_described(before, now)}: {why}.{same}")
        if self._epochs and before != now:
            (loader,) = _host.train_loaders(trainer)
            _host.replace_train_loader(trainer, with_setting(loader, now))
            end_workers(loader)
            self._log(trainer)

    # --- output -------------------------------------------------------------------------------------------------------

    def _say(self, trainer: AnyTrainer, line: str) -> None:
        if trainer.is_global_zero:
            say(logger, logging.INFO, line)

    def _do_nothing(self, trainer: object, why: str) -> None:
        self._once.say(trainer, logging.INFO, f"AutotuneCallback does nothing: {why}.")

    def _log(self, trainer: AnyTrainer) -> None:
        """Log the settings for the next epochs as metrics."""
        if not trainer.is_global_zero or self._now is None:
            return
        settings = {"num_workers": self._now.num_workers, "prefetch_factor": self._now.prefetch_factor}
        tags = {f"feed/{name}": float(value) for name, value in settings.items() if value is not None}
        step = _host.steps_logged(trainer)
        for number, each in enumerate(trainer.loggers):
            task = f"log its settings to {type(each).__name__} (trainer.loggers[{number}])"
            self._guard.attempt(task, each.log_metrics, tags, step=step)


def is_late(tuned: Tuned, own: Setting, *, step_ms: float, data_idle_ms: float) -> bool:
    """True if training is starved, and batches take longer than in the trials.

    They take longer than with the user's setting, and, by more than ``LATE``, longer than with the tuned setting. With
    workers, a loader has the whole step to make a batch; without, only the time in which the step waits for it.

    Args:
        tuned: the result of the trials.
        own: the setting of the user's loader.
        step_ms: mean time of a step.
        data_idle_ms: mean time of a step spent waiting for data.
    """
    if 100 * data_idle_ms < STARVED_PCT * step_ms:
        return False
    rates = {trial.setting: trial.batches_per_s for trial in tuned.trials}
    limits = {tuned.setting: (1 + LATE, tuned.batches_per_s), own: (1.0, rates.get(own))}
    return not any(
        per_s and (step_ms if setting.num_workers else data_idle_ms) <= share * 1e3 / per_s
        for setting, (share, per_s) in limits.items()
    )


def _described(before: Setting, now: Setting) -> str:
    changed = [(name, getattr(before, name), getattr(now, name)) for name in _SET]
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in changed if old != new)
