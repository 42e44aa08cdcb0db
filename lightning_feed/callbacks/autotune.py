"""AutotuneCallback: finds the number of workers with which training is fastest, and sets it."""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original
from lightning_feed.callbacks.autotune_lines import cost_of, described, too_short, tried
from lightning_feed.callbacks.starvation import GPUStarvationCallback
from lightning_feed.callbacks.starvation_facts import time_left
from lightning_feed.callbacks.starvation_loggers import LoggerOutput
from lightning_feed.callbacks.starvation_run import StarvationRun
from lightning_feed.callbacks.tuned_loader import TunedLoader
from lightning_feed.errors import SettingsError, refuses_unknown_arguments
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.loader_tree import walk_loaders
from lightning_feed.load.rank_store import gather
from lightning_feed.load.rehearsal import Refusal, Rehearsal
from lightning_feed.load.settings import MOST, REGISTERING_DEVICES, Setting
from lightning_feed.measure.guard import Guard, Once, check_instance, guarded, say
from lightning_feed.transfer.resident import ResidentLoader
from lightning_feed.trials.comparison import Comparison
from lightning_feed.trials.in_fit import (
    KEEPS,
    fills_a_cache,
    goal_of,
    is_to_stop,
    keys_in_fit,
    rehearsal_of,
    slowest_work,
    tune_for_fit,
    why_fixed,
    why_left_alone,
    work_of,
)
from lightning_feed.trials.search import ALIKE
from lightning_feed.trials.time_left import MOST_S, TimeLeft
from lightning_feed.trials.training_work import TrainingWork
from lightning_feed.trials.tune_loader import Goal, Store, Tuned

logger = logging.getLogger(__name__)

MEASURED_STEPS = 20
"""Training steps measured before the trials, after the warm-up of the meter."""
PROVING_STEPS = 20
"""Training steps measured with the result, after the warm-up of the meter."""
_CHANGES = "the program changes the dataset within an epoch, which worker processes cannot see"


@dataclass(frozen=True, kw_only=True)
class Move:
    """A change of the training loader."""

    epoch: int
    """Epoch of the change (``trainer.current_epoch``)."""
    setting: Setting
    reason: str


class AutotuneCallback(Callback):
    """Finds the number of workers with which training is fastest, and sets it.

    The callback measures the first training steps. A rehearsal then sees in forked processes whether samples stay the
    same in workers; if not, their number stays. It tries your setting and others in forked processes that imitate the
    steps, and continues the same epoch with the fastest setting, the start of workers in each epoch included. Worker
    processes of all others hand their batches over in place. Nothing changes unless a setting makes steps more than 3 %
    shorter, and is faster than yours in each of up to three turns, nor if trials of your setting take other times than
    training just has. On CUDA, batches in place are tried even if the trials gain nothing, because trials
    neither pin batches nor copy them to the device. If steps of training itself then take longer than before, or are
    less than 3 % shorter with batches in place, the callback returns to your setting. The result is remembered for this
    machine, model and data, and the next run begins with it.

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
        self._run: StarvationRun | None = None
        self._forget()

    def _new_guard(self) -> Guard:
        return Guard("AutotuneCallback", self._stop_measuring)

    def _forget(self) -> None:
        self.decided = False
        """True once this fit's number of workers is known to stay: after trials, or because nothing may be changed."""
        self._moves: list[Move] = []
        self._loader: TunedLoader | None = None
        """The training loader, once Lightning has made it; None if it is left alone."""
        self._loaders = 1
        """Number of training loaders."""
        self._waits_for_steps = False
        """True until the trials have run."""
        self._waits_until = 0.0
        """Number of finished steps before which no trial runs; infinite if none may run in this epoch."""
        self._before_ms: float | None = None
        """Mean time of a step before the trials, in milliseconds."""
        self._before_noise_ms = 0.0
        """Half the width of its 95 % interval."""
        self._input_pct = 0.0
        """Share of a step before the trials that waited for data or for its copy: the longest of all ranks."""
        self._rehearsal: Rehearsal | None = None
        """The rehearsal of the training loader; None until one was needed."""
        self._first_epoch = 0
        """The epoch in which the fit began."""
        self._comparison: Comparison | None = None
        """The settings that training itself compares with the user's; None once it has."""
        self._tuned: Tuned | None = None
        """The result in use."""

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners, but a running fit cannot be.
        return {**self.__dict__, "_run": None, "_wraps": [], "_loader": None}

    @property
    def moves(self) -> tuple[Move, ...]:
        """Changes of this fit or the last one, in order."""
        return tuple(self._moves)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare to replace the training loader that Lightning makes for this fit."""
        if stage == "fit":
            self._guard = self._new_guard()
            self._guard.measure(self._begin, trainer)

    def _begin(self, trainer: AnyTrainer) -> None:
        self._let_go()
        self._forget()
        first = next(callback for callback in _host.callbacks_of(trainer) if isinstance(callback, AutotuneCallback))
        if _host.is_fast_dev_run(trainer):
            self._do_nothing(trainer, "this is a fast_dev_run")
        elif first is not self:
            self._do_nothing(trainer, "another AutotuneCallback is at work")
        else:
            self._wraps = [
                _host.wrap_train_source(trainer, self._count),
                _host.Wrap(trainer.strategy, "process_dataloader", partial(self._process, trainer)),
                _host.wrap_epoch_start(trainer, partial(self._begin_epoch, trainer)),
            ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring if trials are to come and no GPUStarvationCallback measures."""
        self._guard.measure(self._start_measuring, trainer)

    @guarded
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch of this callback's own measurement. Trials that waited for this epoch run after some steps."""
        if self._run is not None:
            self._run.epoch_began()
        run = self._measuring_run(trainer)
        if self._waits_until == math.inf and run is not None and trainer.current_epoch > self._first_epoch:
            run.restart()  # the first epoch has filled what the dataset keeps, so its steps took longer
            self._waits_until = run.finished + MEASURED_STEPS

    @guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Note the batch if this callback does its own measuring."""
        if self._run is not None:
            self._run.batch_came(batch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Count the step. Once enough steps are measured, run the trials, or check their result."""
        if self._loader is not None and self._loader.step_ended():
            self._guard.measure(self._look_for_changes, trainer)
        if not self._waits_for_steps and self._comparison is None:
            return
        if self._run is not None:
            self._guard.measure(self._run.step_ended)
        run = self._measuring_run(trainer)
        if run is None or run.finished < self._steps_to_measure(run):
            return
        if self._waits_for_steps:
            self._guard.measure(self._run_trials, trainer, run)
        else:
            self._guard.measure(self._check, trainer, run)
        if not self._waits_for_steps and self._comparison is None:
            self._stop_measuring()

    def _steps_to_measure(self, run: StarvationRun) -> float:
        """The number of steps after which the trials run, or their result is checked."""
        steps = MEASURED_STEPS if self._waits_for_steps else PROVING_STEPS
        return max(run.main.warm_up + steps, self._waits_until)

    def _run_trials(self, trainer: Trainer, run: StarvationRun) -> None:
        """Run the trials and use their result, unless something says that there must be none, or not yet."""
        assert self._loader is not None
        self._waits_for_steps = False
        self._before_ms = mean_step_ms(run)
        self._before_noise_ms = step_noise_ms(run)
        if any(gather(trainer, self._loader.has_changed())):
            self._give_up(trainer, _CHANGES)
            return
        left = self._time_left(trainer, run)
        if self.budget_s is None and not left.pays_for_trials:
            self._give_up(trainer, too_short(left))
            self.decided = False
            return
        with run.trials():
            if not self._may_try(trainer, left):
                return
            self._loader.undecided = False
            tuned = self._guard.attempt("tune the training loader", self._tune, trainer, run, left)
            self.decided = True
            if tuned is not None:
                self._apply(trainer, tuned)
            if self._moves:  # later steps have another loader
                run.restart()

    def _give_up(self, trainer: Trainer, why: str) -> None:
        assert self._loader is not None
        self._loader.undecided = False
        self._do_nothing(trainer, why)

    def _may_try(self, trainer: Trainer, left: TimeLeft) -> bool:
        """Rehearse the loader. Returns False if nothing may be tried, or only in a later epoch."""
        assert self._loader is not None
        if self._rehearsal is not None:
            return True
        loader = self._loader.original
        self._rehearsal = self._rehearse(trainer, loader, left.budget_s(gain=0.0))
        why_not = why_left_alone(loader, self._rehearsal)
        if not fills_a_cache(loader, self._rehearsal):
            if why_not:
                self._give_up(trainer, why_not)
            return not why_not
        if loader.num_workers or why_not:
            self._give_up(trainer, why_not or KEEPS)
            return False
        self._waits_for_steps = True
        self._waits_until = math.inf
        self._first_epoch = trainer.current_epoch
        return False

    @guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the training step that contains this validation."""
        if self._run is not None:
            self._run.validation_began()

    def on_train_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Remove everything from the Trainer. Also ``on_exception``, after which Lightning calls no ``teardown``."""
        check_instance(self, AutotuneCallback)
        self._guard.attempt("take out what it had put in", self._let_go)

    on_exception = teardown = on_train_end

    def _let_go(self) -> None:
        while self._wraps:
            self._wraps.pop().undo()
        self._waits_for_steps = False
        self._comparison = None
        self._loader = None
        self._stop_measuring()

    # --- when the loader is made --------------------------------------------------------------------------------------

    def _count(self, original: Original) -> Any:
        structure = original()
        self._loaders = len(walk_loaders(structure))
        return structure

    def _process(self, trainer: AnyTrainer, original: Original, loader: object) -> Any:
        """Return the loader for Lightning to train with in place of the user's."""
        if trainer.training:
            prepared = self._guard.attempt("prepare the training loader", self._prepare, trainer, loader)
            loader = loader if prepared is None else prepared
        return original(loader)

    def _prepare(self, trainer: AnyTrainer, loader: AnyLoader) -> DataLoader[Batch] | None:
        """A copy of a training loader with the setting in use; None if the loader is left alone."""
        if self._loader is None:
            self._loader = self._begin_tuning(trainer, loader)
        if self._loader is None:
            return None
        return self._loader.prepare(loader)

    def _begin_tuning(self, trainer: AnyTrainer, loader: AnyLoader) -> TunedLoader | None:
        """Begin with the result of an earlier run, or with the user's setting. Returns None if nothing may change."""
        why_not = next(filter(None, gather(trainer, self._why_not(loader))), "")  # so that all ranks try, or none
        if why_not:
            self._do_nothing(trainer, why_not)
            return None
        tuned_loader = TunedLoader(trainer, loader)
        self._waits_for_steps = True
        keys = partial(keys_in_fit, loader, trainer, most_workers=self.max_workers)
        may_know = trainer.local_rank == 0 and any(map(Store().may_know, keys(Rehearsal())))
        if not any(gather(trainer, may_know)):
            return tuned_loader
        self._rehearsal = self._rehearse(trainer, loader, MOST_S)
        why_not = why_left_alone(loader, self._rehearsal)
        if why_not:
            self._waits_for_steps = False
            self._do_nothing(trainer, why_not)
            return None
        earlier: Tuned | None = None
        if trainer.local_rank == 0:
            earlier = next(filter(None, map(Store().load, keys(self._rehearsal))), None)
            if earlier is not None and earlier.setting == earlier.own and earlier.in_place is not None:
                earlier = None  # that run ended before training had compared them
        results = gather(trainer, (trainer.node_rank, earlier))
        by_node = {node: tuned for node, tuned in results if tuned is not None}
        if by_node.keys() == {node for node, _ in results}:
            self._waits_for_steps = False
            self.decided = True
            self._tuned = by_node[trainer.node_rank]
            tuned_loader.setting = self._tuned.setting
            tuned_loader.undecided = False
            self._announce(trainer, self._tuned)
        elif fills_a_cache(loader, self._rehearsal):
            self._rehearsal = None  # as if nothing were known
        return tuned_loader

    def _rehearse(self, trainer: AnyTrainer, loader: DataLoader[Batch], budget_s: float) -> Rehearsal:
        """Rehearse the loader on one rank of each node. A refusal on one node holds on all."""
        rehearsal: Rehearsal | None = None
        if self.budget_s is not None:
            budget_s = self.budget_s
        if trainer.local_rank == 0:
            try:
                rehearsal = rehearsal_of(loader, budget_s, lambda: is_to_stop(trainer))
            except Exception as error:  # noqa: BLE001  # the other ranks wait
                rehearsal = Rehearsal(refusal=Refusal(reason="error", detail=f"{type(error).__name__}: {error}"))
        by_node = {node: found for node, found in gather(trainer, (trainer.node_rank, rehearsal)) if found is not None}
        refusal = next((found.refusal for found in by_node.values() if found.refusal is not None), None)
        own: Rehearsal = by_node[trainer.node_rank]
        return replace(own, refusal=refusal)

    def _goal(self, trainer: AnyTrainer, work: TrainingWork) -> Goal:
        return goal_of(trainer, work=work, most_workers=self.max_workers, budget_s=self.budget_s or MOST_S)

    def _why_not(self, loader: object) -> str:
        if self._loaders != 1:
            return f"there are {self._loaders} training loaders"
        if isinstance(loader, ResidentLoader):
            return "the training set is on the device, so there is nothing to load"
        if not isinstance(loader, DataLoader):
            return f"the training loader ({type(loader).__name__}) is not a DataLoader"
        return why_fixed(loader)

    def _begin_epoch(self, trainer: AnyTrainer, original: Original, *args: Any) -> Any:
        if self._loader is not None:
            self._guard.measure(self._loader.epoch_begins)
        return original(*args)

    # --- the trials ---------------------------------------------------------------------------------------------------

    def _start_measuring(self, trainer: AnyTrainer) -> None:
        is_measured = any(isinstance(callback, GPUStarvationCallback) for callback in _host.callbacks_of(trainer))
        if self._waits_for_steps and not is_measured:
            self._run = StarvationRun(trainer, window_steps=0, guard=self._guard)
            self._run.start()

    def _stop_measuring(self) -> None:
        run = self._run
        self._run = None
        if run is not None:
            run.close()

    def _measuring_run(self, trainer: AnyTrainer) -> StarvationRun | None:
        """The run that measures the steps, of this callback or of a GPUStarvationCallback; None if there is none."""
        if self._run is not None:
            return self._run
        for callback in _host.callbacks_of(trainer):
            if isinstance(callback, GPUStarvationCallback):
                return callback.measured_fit
        return None

    def _time_left(self, trainer: AnyTrainer, run: StarvationRun) -> TimeLeft:
        """The rest of the fit, for the rank that has least time."""
        stats = run.main.measurements(prefetch_active=None).stats
        of_ranks: list[TimeLeft] = gather(trainer, time_left(trainer, stats, run.wall))
        return min(of_ranks, key=lambda of_rank: of_rank.seconds)

    def _tune(self, trainer: AnyTrainer, run: StarvationRun, left: TimeLeft) -> Tuned | None:
        assert self._loader is not None
        measured = run.main.measurements(prefetch_active=None)
        ranks = gather(trainer, (work_of(measured), measured.stats.input_pct))
        self._input_pct = max(input_pct or 0.0 for _, input_pct in ranks)
        works = [work for work, _ in ranks]
        goal = replace(
            self._goal(trainer, slowest_work(works)),
            time_left=left if self.budget_s is None else None,
            own_step_s=left.step_s or None,
            steps_per_epoch=_host.batches_of(trainer, "fit") or math.inf,
        )
        assert self._rehearsal is not None
        return tune_for_fit(self._loader.original, trainer, goal, self._rehearsal)

    def _apply(self, trainer: AnyTrainer, tuned: Tuned) -> None:
        """Use the result. If this changes the loader, training itself compares its next steps with those before."""
        assert self._loader is not None
        from_trials = tuned
        tuned = self._beyond_trials(trainer, from_trials)
        settings = [tuned.setting]
        if tuned.without_workers is not None and tuned.own.in_order:  # else the epoch cannot change its loader
            settings.append(tuned.without_workers)
        settings = [setting for setting in dict.fromkeys(settings) if setting != tuned.own]
        if tuned is from_trials and (not settings or tuned.without_workers is None):
            self._save(trainer, tuned, final=not settings)
        rounds = max(gather(trainer, len(settings)))  # nodes may have different results, and all ranks take part
        if not rounds:
            self._announce(trainer, tuned)
            return
        settings += [tuned.setting] * (rounds - len(settings))
        if tuned.setting == tuned.own:
            self._say(trainer, f"AutotuneCallback keeps {tuned.own} for now: {tuned.reason}.")
        else:
            self._announce(trainer, tuned)
        own_ms = max((before or math.inf) for before in gather(trainer, self._before_ms))  # the slowest rank counts
        own_noise_ms = max(gather(trainer, self._before_noise_ms))
        self._tuned = tuned
        self._comparison = Comparison(tuned, settings, own_ms, own_noise_ms)
        self._use_next(trainer)

    def _use_next(self, trainer: AnyTrainer) -> None:
        """Train with the setting that the comparison takes next."""
        assert self._loader is not None
        assert self._comparison is not None
        setting = self._comparison.setting
        tuned = self._comparison.tuned
        if setting not in (tuned.setting, self._loader.setting):
            reason = f"training itself compares {setting}, whose gain trials cannot tell"
            self._note_move(trainer, setting, reason)
            self._say(trainer, f"AutotuneCallback, epoch {trainer.current_epoch}: {reason}.")
        has_changed = setting == self._loader.setting or self._loader.switch(setting)
        if all(gather(trainer, has_changed)):
            return
        self._comparison = None
        if self._loader.setting != tuned.setting:  # the choice of the trials comes with the next epoch
            self._loader.switch(tuned.setting)

    def _beyond_trials(self, trainer: AnyTrainer, tuned: Tuned) -> Tuned:
        """The result, or batches in place if the trials chose the user's setting, but may have missed what they gain.

        Trials do not pin batches, and do not copy them to the device, so only training itself can show this gain.
        """
        device_type = trainer.strategy.root_device.type
        if tuned.setting != tuned.own or tuned.in_place is None or device_type not in REGISTERING_DEVICES:
            return tuned
        if self._input_pct < 100 * (ALIKE - 1) or not tuned.own.in_order:  # such an epoch cannot change its loader
            return tuned
        reason = f"trials neither pin batches nor copy them, which takes up to {self._input_pct:.0f} % of a step"
        return replace(tuned, setting=tuned.in_place, reason=f"{reason}, so training itself compares")

    def _check(self, trainer: AnyTrainer, run: StarvationRun) -> None:
        """Compare the steps of training with the setting in use. After the last setting, take the fastest."""
        comparison = self._comparison
        assert comparison is not None
        assert self._loader is not None
        step_ms = max((after or math.inf) for after in gather(trainer, mean_step_ms(run)))
        comparison.note(step_ms, max(gather(trainer, step_noise_ms(run))))
        if comparison.go_on():
            self._use_next(trainer)
            run.restart()
            return
        self._comparison = None
        tuned = comparison.tuned
        fastest = comparison.fastest()
        before_ms = comparison.step_ms(tuned.own)
        compared = comparison.setting if fastest == tuned.own else fastest
        after_ms = comparison.step_ms(compared)
        if not math.isfinite(before_ms + after_ms):
            return  # too few steps could be measured
        reason = f"training itself took {before_ms:.3g} ms a step with {tuned.own} and {after_ms:.3g} with {compared}"
        whole = tuned.whole or fastest != tuned.own
        proven = replace(tuned, setting=fastest, reason=reason, trained_ms=(before_ms, after_ms), whole=whole)
        self._tuned = proven
        self._save(trainer, proven)
        stays = fastest == self._loader.setting
        what = "keeps" if stays else "goes back to"
        self._say(trainer, f"AutotuneCallback, epoch {trainer.current_epoch}, {what} {fastest}: {reason}.")
        if stays:
            return
        self._note_move(trainer, fastest, reason)
        self._loader.switch(fastest)
        run.restart()

    def _look_for_changes(self, trainer: AnyTrainer) -> None:
        """Go back to the user's setting if the dataset has changed within the epoch."""
        assert self._loader is not None
        if self._tuned is None or not any(gather(trainer, self._loader.adds_workers and self._loader.has_changed())):
            return
        own = replace(self._tuned, setting=self._tuned.own, reason=_CHANGES)
        self._comparison = None
        self._stop_measuring()
        self._save(trainer, own)
        self._say(trainer, f"AutotuneCallback, epoch {trainer.current_epoch}, goes back to {own.setting}: {_CHANGES}.")
        self._note_move(trainer, own.setting, _CHANGES)
        self._loader.switch(own.setting)

    def _save(self, trainer: AnyTrainer, tuned: Tuned, *, final: bool = True) -> None:
        """Save a result for the next run, in which nothing is left to compare. Only whole searches are saved."""
        assert self._loader is not None
        if trainer.local_rank == 0 and tuned.whole:
            assert self._rehearsal is not None
            key, _ = keys_in_fit(self._loader.original, trainer, self._rehearsal, self.max_workers)
            Store().save(key, replace(tuned, in_place=None), final=final)

    def _announce(self, trainer: AnyTrainer, tuned: Tuned) -> None:
        """Say which setting the training loader has from here on, and why."""
        origin = "an earlier run found: " if tuned.remembered else ""
        if tuned.setting == tuned.own:
            self._say(trainer, f"AutotuneCallback keeps {tuned.own}: {origin}{tuned.reason}.")
            return
        self._note_move(trainer, tuned.setting, tuned.reason)
        self._say(
            trainer,
            f"AutotuneCallback, epoch {trainer.current_epoch}: {described(tuned.own, tuned.setting)}: "
            f"{origin}{tuned.reason}{tried(tuned)}. The order of samples stays; random numbers drawn inside workers "
            f"differ.{cost_of(tuned)}",
        )

    def _note_move(self, trainer: AnyTrainer, setting: Setting, reason: str) -> None:
        self._moves.append(Move(epoch=trainer.current_epoch, setting=setting, reason=reason))
        self._log(trainer, setting)

    # --- output -------------------------------------------------------------------------------------------------------

    def _say(self, trainer: AnyTrainer, line: str) -> None:
        if trainer.is_global_zero:
            say(logger, logging.INFO, line)

    def _do_nothing(self, trainer: AnyTrainer, why: str) -> None:
        self.decided = True
        self._once.say(trainer, logging.INFO, f"AutotuneCallback does nothing: {why}.")

    def _log(self, trainer: AnyTrainer, setting: Setting) -> None:
        """Log the setting as metrics."""
        if not trainer.is_global_zero:
            return
        metrics = {"feed/num_workers": float(setting.num_workers)}
        if setting.prefetch_factor is not None:
            metrics["feed/prefetch_factor"] = float(setting.prefetch_factor)
        step = _host.steps_logged(trainer)
        output = LoggerOutput(trainer, self._guard)
        output.for_each("log its settings to", lambda trainer_logger: trainer_logger.log_metrics(metrics, step=step))


def mean_step_ms(run: StarvationRun) -> float | None:
    """Mean time of a step since the measuring began, in milliseconds; None after too few steps."""
    return run.main.measurements(prefetch_active=None).stats.step_ms


def step_noise_ms(run: StarvationRun) -> float:
    """Half the width of the 95 % interval of that mean, in milliseconds; 0.0 if it is not known."""
    stats = run.main.measurements(prefetch_active=None).stats
    if stats.step_low_ms is None or stats.step_high_ms is None:
        return 0.0
    return (stats.step_high_ms - stats.step_low_ms) / 2
