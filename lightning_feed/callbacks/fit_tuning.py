"""The course of tuning in one fit: measured steps, trials, and a comparison by training itself."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.utils.data import DataLoader

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.callbacks.starvation_facts import time_left
from lightning_feed.callbacks.starvation_run import StarvationRun
from lightning_feed.callbacks.tuning_log import TuningLog, too_short
from lightning_feed.in_fit.comparison import Comparison
from lightning_feed.in_fit.goal import (
    KEEPS,
    fills_a_cache,
    goal_of,
    is_to_stop,
    key_in_fit,
    rehearsal_of,
    slowest_work,
    tune_for_fit,
    why_left_alone,
    work_of,
)
from lightning_feed.in_fit.tuned_loader import TunedLoader
from lightning_feed.load.kinds import Batch
from lightning_feed.load.rehearsal import Refusal, Rehearsal
from lightning_feed.load.settings import REGISTERING_DEVICES, Setting
from lightning_feed.machine.limits import read_machine
from lightning_feed.measure.cpu_time import OtherPrograms
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.measurements import OTHERS_PCT
from lightning_feed.measure.rank_store import gather
from lightning_feed.measure.windows import WARM_UP_STEPS
from lightning_feed.trials.search import ALIKE, UNLIKE
from lightning_feed.trials.time_left import MOST_S, TimeLeft
from lightning_feed.trials.tune_loader import Key, Store, Tuned

MEASURED_STEPS = 20
"""Training steps measured before the trials, after the warm-up of the meter."""
PROVING_STEPS = 20
"""Training steps measured with the result, after the warm-up of the meter."""
_STEPS_LEFT = 10 * (WARM_UP_STEPS + PROVING_STEPS)
"""Steps left in the fit from which a remembered setting is compared, which takes a tenth of them, as trials may."""
_CANNOT_TELL = "whose gain trials cannot tell"
_CHANGES = "the program changes the dataset within an epoch, which worker processes cannot see"


class Phase(enum.Enum):
    """The next thing to do. While training compares settings, the comparison stands in place of a phase."""

    TRIALS = enum.auto()
    """Steps with the user's setting are measured, and the trials follow."""
    RECALLED = enum.auto()
    """Steps with the result of an earlier run are measured, to see if they take the time that they took there."""
    NEXT_EPOCH = enum.auto()
    """The first epoch fills what the dataset keeps, so its steps say nothing: those of the next one are measured."""
    NOTHING = enum.auto()
    """Nothing is measured any more."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a training step, of the slowest rank."""

    mean_ms: float
    """In milliseconds; infinite after too few steps."""
    noise_ms: float
    """Half the width of the 95 % interval of the mean, in milliseconds."""
    input_pct: float
    """Share of a step that waits for data or for its copy, in percent."""


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The user's limits."""

    max_workers: int | None = None
    """Largest number of workers to try; None for no limit but those of the machine."""
    budget_s: float | None = None
    """Seconds for the rehearsal and the trials; None for what the fit can return."""


class FitTuning:
    """Finds the setting of the only training loader of a fit, and sets it.

    All ranks make the same calls, and each decision follows from what :func:`gather` has collected of all of them:
    otherwise one rank would wait for another that trains.

    Args:
        trainer: the Trainer of the fit.
        loader: the user's loader, as Lightning first prepared it.
        options: the user's limits.
        guard: the callback's guard.
        log: notes and tells what happens.

    Attributes:
        loader: the training loader with the setting in use.
    """

    def __init__(
        self, trainer: AnyTrainer, loader: DataLoader[Batch], options: TrialOptions, guard: Guard, log: TuningLog
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._guard = guard
        self._log = log
        self.loader = TunedLoader(trainer, loader)
        self._next: Phase | Comparison = Phase.TRIALS
        self._not_before = 0
        """Number of finished steps before which nothing follows."""
        self._warm_up: int | None = None
        """Steps of the longest warm-up of all ranks, whose loaders may differ; None until it is asked for."""
        self._rehearsal: Rehearsal | None = None
        """The rehearsal of the training loader; None until one was needed."""
        self._tuned: Tuned | None = None
        """The result in use."""
        self._others: OtherPrograms | None = None
        """Watches other programs while training compares."""

    # --- an earlier result --------------------------------------------------------------------------------------------

    def recall(self) -> str:
        """Use the result of an earlier fit, if there is one and a rehearsal passes.

        If its steps take other times in this fit, training itself compares it with the user's setting.

        Returns:
            The reason why nothing may be tried in this fit; empty if something may, or if a result is used.
        """
        may_know = self._trainer.local_rank == 0 and Store().may_know(self._key(Rehearsal()))
        if not any(gather(self._trainer, may_know)):
            return ""
        original = self.loader.original
        rehearsal = self._rehearse(MOST_S)
        why_not = why_left_alone(original, rehearsal)
        if why_not:
            return why_not
        earlier = self._earlier(rehearsal)
        if earlier is not None:
            self._rehearsal = rehearsal
            self.use(earlier)
            is_to_check = earlier.setting != earlier.own and not fills_a_cache(original, rehearsal)
            if any(gather(self._trainer, is_to_check)):  # the steps that fill a cache say nothing
                self._next = Phase.RECALLED
            self._log.outcome.decided = True
            self._log.announce(earlier)
        elif not fills_a_cache(original, rehearsal):  # else a later epoch rehearses again
            self._rehearsal = rehearsal
        return ""

    def use(self, tuned: Tuned) -> None:
        """Begin the fit with a setting."""
        self._next = Phase.NOTHING
        self._tuned = tuned
        self.loader.setting = tuned.setting
        self.loader.undecided = False

    def _earlier(self, rehearsal: Rehearsal) -> Tuned | None:
        """Return the result of an earlier fit for this node; None unless all nodes have one."""
        trainer = self._trainer
        earlier: Tuned | None = None
        if trainer.local_rank == 0:
            earlier = Store().load(self._key(rehearsal))
        results = gather(trainer, (trainer.node_rank, earlier))
        by_node: dict[int, Tuned] = {node: tuned for node, tuned in results if tuned is not None}
        if by_node.keys() != {node for node, _ in results}:
            return None
        return by_node[trainer.node_rank]

    def _key(self, rehearsal: Rehearsal) -> Key:
        return key_in_fit(self.loader.original, self._trainer, rehearsal, self._options.max_workers)

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def measures_steps(self) -> bool:
        """True as long as steps have to be measured."""
        return self._next is not Phase.NOTHING

    def epoch_began(self, run: StarvationRun) -> None:
        """Measure the steps of this epoch if trials have waited for it."""
        if self._next is Phase.NEXT_EPOCH:
            self._next = Phase.TRIALS
            self._measure_anew(run)
            self._not_before = run.finished + MEASURED_STEPS

    def step_ended(self, run: StarvationRun) -> None:
        """Run the trials, or compare settings, once enough steps are measured.

        Args:
            run: the run that has measured them.
        """
        if isinstance(self._next, Comparison):
            if self._has_finished(run, PROVING_STEPS):
                self._compare(self._next, run)
        elif self._next is Phase.RECALLED and self._has_finished(run, PROVING_STEPS):
            self._next = Phase.NOTHING
            self._check_recalled(run)
        elif self._next is Phase.TRIALS and self._has_finished(run, MEASURED_STEPS):
            self._next = Phase.NOTHING
            self._try_settings(run)

    def _has_finished(self, run: StarvationRun, steps: int) -> bool:
        if self._warm_up is None:
            self._warm_up = max(gather(self._trainer, run.main.warm_up))
        return run.finished >= max(self._warm_up + steps, self._not_before)

    def _measure_anew(self, run: StarvationRun) -> None:
        """Leave out all steps so far. On all ranks or on none, since they count steps together."""
        run.restart()
        self._warm_up = None
        self._not_before = 0

    def _step_time(self, run: StarvationRun) -> StepTime:
        """Return the largest step time, noise and input share of all ranks since the measuring began."""
        run.main.meter.catch_up()  # on a device, the times of steps are read only now and then
        input_pct = run.main.measurements(prefetch_active=None).stats.input_pct
        ranks = gather(self._trainer, (mean_step_ms(run), step_noise_ms(run), input_pct))
        return StepTime(
            mean_ms=max(mean_ms or math.inf for mean_ms, _, _ in ranks),
            noise_ms=max(noise_ms for _, noise_ms, _ in ranks),
            input_pct=max(waits_pct or 0.0 for _, _, waits_pct in ranks),
        )

    # --- the trials ---------------------------------------------------------------------------------------------------

    def _try_settings(self, run: StarvationRun) -> None:
        """Run the trials and use their result, unless something says that there must be none, or not yet."""
        before = self._step_time(run)
        if math.isinf(before.mean_ms):
            self._measure_more(Phase.TRIALS, run)
            return
        if any(gather(self._trainer, self.loader.has_changed())):
            self._give_up(_CHANGES)
            return
        left = self._time_left(run)
        if self._options.budget_s is None and not left.pays_for_trials:
            self._give_up(too_short(left))
            self._log.outcome.decided = False
            return
        with run.trials():
            if not self._may_try(left):
                return
            self.loader.undecided = False
            tuned = self._guard.attempt("tune the training loader", self._tune, run, left)
            self._log.outcome.decided = True
            if tuned is not None:
                self._apply(tuned, before)
            if any(gather(self._trainer, bool(self._log.outcome.moves))):  # later steps have another loader
                self._measure_anew(run)

    def _measure_more(self, following: Phase | Comparison, run: StarvationRun) -> None:
        """Measure further steps first: the device is so far behind that too few have a time."""
        self._next = following
        self._not_before = run.finished + MEASURED_STEPS

    def _give_up(self, why: str) -> None:
        self.loader.undecided = False
        self._log.does_nothing(why)

    def _time_left(self, run: StarvationRun) -> TimeLeft:
        """Return the time left in the fit, on the rank that has least."""
        stats = run.main.measurements(prefetch_active=None).stats
        of_ranks: list[TimeLeft] = gather(self._trainer, time_left(self._trainer, stats, run.wall))
        return min(of_ranks, key=lambda of_rank: of_rank.seconds)

    def _may_try(self, left: TimeLeft) -> bool:
        """Rehearse the loader. Returns False if nothing may be tried, or only in a later epoch."""
        if self._rehearsal is not None:
            return True
        loader = self.loader.original
        self._rehearsal = self._rehearse(left.budget_s(gain=0.0))
        why_not = why_left_alone(loader, self._rehearsal)
        keeps = fills_a_cache(loader, self._rehearsal)
        if keeps and loader.num_workers and not why_not:
            why_not = KEEPS
        if why_not:
            self._give_up(why_not)
            return False
        if keeps:
            self._next = Phase.NEXT_EPOCH
        return not keeps

    def _rehearse(self, budget_s: float) -> Rehearsal:
        """Rehearse the loader on one rank of each node. A refusal on one node holds on all."""
        trainer = self._trainer
        rehearsal: Rehearsal | None = None
        if trainer.local_rank == 0:
            try:
                rehearsal = rehearsal_of(
                    self.loader.original, self._options.budget_s or budget_s, lambda: is_to_stop(trainer)
                )
            except Exception as error:  # noqa: BLE001  # the other ranks wait
                rehearsal = Rehearsal(refusal=Refusal(reason="error", detail=f"{type(error).__name__}: {error}"))
        by_node = {node: found for node, found in gather(trainer, (trainer.node_rank, rehearsal)) if found is not None}
        refusal = next((found.refusal for found in by_node.values() if found.refusal is not None), None)
        own: Rehearsal = by_node[trainer.node_rank]
        return replace(own, refusal=refusal)

    def _tune(self, run: StarvationRun, left: TimeLeft) -> Tuned | None:
        trainer = self._trainer
        options = self._options
        works = gather(trainer, work_of(run.main.measurements(prefetch_active=None)))
        goal = goal_of(
            trainer,
            work=slowest_work(works),
            most_workers=options.max_workers,
            budget_s=options.budget_s or MOST_S,
        )
        goal = replace(
            goal,
            time_left=left if options.budget_s is None else None,
            own_step_s=left.step_s or None,
            steps_per_epoch=_host.batches_of(trainer, "fit") or math.inf,
        )
        assert self._rehearsal is not None
        return tune_for_fit(self.loader.original, trainer, goal, self._rehearsal)

    def _apply(self, from_trials: Tuned, before: StepTime) -> None:
        """Use the result. If this changes the loader, training itself compares its next steps with those before."""
        tuned = self._beyond_trials(from_trials, before)
        settings = _to_compare(tuned)
        if tuned is from_trials and (not settings or tuned.without_workers is None):
            self._save(tuned, final=not settings)
        rounds = max(gather(self._trainer, len(settings)))  # nodes may differ, and all ranks take part
        if not rounds:
            self._log.announce(tuned)
            return
        settings += [tuned.setting] * (rounds - len(settings))
        if tuned.setting == tuned.own:
            self._log.say(f"AutotuneCallback keeps {tuned.own} for now: {tuned.reason}.")
        else:
            self._log.announce(tuned)
        self._tuned = tuned
        self._train_with_next(Comparison(tuned, settings, before.mean_ms, before.noise_ms))

    def _beyond_trials(self, tuned: Tuned, before: StepTime) -> Tuned:
        """Return the result, or batches in place if the trials chose the user's setting, but may have missed what they
        gain.

        Trials do not pin batches, and do not copy them to the device, so only training itself can show this gain.
        """
        device_type = self._trainer.strategy.root_device.type
        if tuned.setting != tuned.own or tuned.in_place is None or device_type not in REGISTERING_DEVICES:
            return tuned
        if before.input_pct < 100 * (ALIKE - 1) or not tuned.own.in_order:  # such an epoch cannot change its loader
            return tuned
        reason = f"trials neither pin batches nor copy them, which takes up to {before.input_pct:.0f} % of a step"
        return replace(tuned, setting=tuned.in_place, reason=f"{reason}, so training itself compares")

    # --- training itself compares -------------------------------------------------------------------------------------

    def _check_recalled(self, run: StarvationRun) -> None:
        """Compare the result of an earlier fit with the user's setting, unless its steps take the time they took there.

        The machine or the data may have changed since then, or other programs may have been busy.
        """
        assert self._tuned is not None
        measured = self._step_time(run)
        if math.isinf(measured.mean_ms):
            self._measure_more(Phase.RECALLED, run)
            return
        tuned = self._tuned
        took_ms = math.inf if tuned.trained_ms is None else tuned.trained_ms[1]
        takes_ms = tuned.with_start_ms(tuned.setting, measured.mean_ms)
        is_as_promised = takes_ms < UNLIKE * took_ms and took_ms < UNLIKE * takes_ms
        if all(gather(self._trainer, is_as_promised or tuned.setting == tuned.own)):
            return
        if self._time_left(run).steps < _STEPS_LEFT:
            return
        promised = "this was not seen in training yet"
        if tuned.trained_ms is not None:
            promised = f"a step takes {takes_ms:.3g} ms, and took {took_ms:.3g} when this was found"
        comparison = Comparison(tuned, [tuned.own], measured.mean_ms, measured.noise_ms, measured=tuned.setting)
        if self._train_with_next(comparison, promised):
            self._measure_anew(run)

    def _train_with_next(self, comparison: Comparison, why: str = _CANNOT_TELL) -> bool:
        """Train with the setting that a comparison takes next, if the epoch can change its loader.

        Args:
            comparison: the comparison.
            why: the reason to compare a setting that was not chosen.

        Returns:
            True if the setting is in use on all ranks. Otherwise nothing is compared.
        """
        setting = comparison.setting
        chosen = comparison.tuned.setting
        in_use = self.loader.setting
        if not all(gather(self._trainer, self.loader.switch(setting))):
            self._next = Phase.NOTHING
            self.loader.switch(chosen)  # for the next epoch
            return False
        self._next = comparison
        if self._others is None and self._trainer.num_devices == 1:  # else other ranks would count as other programs
            self._others = OtherPrograms()
        if setting not in (chosen, in_use):
            reason = f"training itself compares {setting}, {why}"
            self._log.note_move(setting, reason)
            self._log.say(f"{self._log.now}: {reason}.")
        return True

    def _compare(self, comparison: Comparison, run: StarvationRun) -> None:
        """Note the steps of training with the setting in use. After the last setting, take the fastest."""
        measured = self._step_time(run)
        if math.isinf(measured.mean_ms):
            self._measure_more(comparison, run)
            return
        comparison.note(measured.mean_ms, measured.noise_ms)
        if comparison.go_on():
            if self._train_with_next(comparison):
                self._measure_anew(run)
            return
        self._next = Phase.NOTHING
        proven = _proven(comparison)
        self._tuned = proven
        others_pct = self._others and self._others.others_pct(read_machine().usable_cpus)
        if (others_pct or 0.0) < OTHERS_PCT:
            self._save(proven)
        stays = proven.setting == self.loader.setting
        what = "keeps" if stays else "goes back to"
        self._log.say(f"{self._log.now}, {what} {proven.setting}: {proven.reason}.")
        self.loader.switch(proven.setting)
        if not stays:
            self._log.note_move(proven.setting, proven.reason)
            self._measure_anew(run)

    def look_for_changes(self) -> None:
        """Go back to the user's setting if the dataset has changed within the epoch."""
        if self._tuned is None:
            return
        if not any(gather(self._trainer, self.loader.adds_workers and self.loader.has_changed())):
            return
        own = replace(self._tuned, setting=self._tuned.own, reason=_CHANGES)
        self._next = Phase.NOTHING
        self._save(own)
        self._log.say(f"{self._log.now}, goes back to {own.setting}: {_CHANGES}.")
        self._log.note_move(own.setting, _CHANGES)
        self.loader.switch(own.setting)

    def _save(self, tuned: Tuned, *, final: bool = True) -> None:
        """Save a result for the next fit. Only whole searches are saved."""
        if self._trainer.local_rank == 0 and tuned.whole:
            assert self._rehearsal is not None
            Store().save(self._key(self._rehearsal), replace(tuned, in_place=None), final=final)


def _to_compare(tuned: Tuned) -> list[Setting]:
    """Return the settings that training itself has to compare with the user's, the choice of the trials first."""
    settings: Sequence[Setting] = [tuned.setting]
    if tuned.without_workers is not None and tuned.own.in_order:  # else the epoch cannot change its loader
        settings = [tuned.setting, tuned.without_workers]
    return [setting for setting in dict.fromkeys(settings) if setting != tuned.own]


def _proven(comparison: Comparison) -> Tuned:
    """Return the result of a comparison whose settings were all measured."""
    tuned = comparison.tuned
    fastest = comparison.fastest()
    compared = comparison.fastest_other() if fastest == tuned.own else fastest
    before_ms = comparison.step_ms(tuned.own)
    after_ms = comparison.step_ms(compared)
    return replace(
        tuned,
        setting=fastest,
        reason=f"training itself took {before_ms:.3g} ms a step with {tuned.own} and {after_ms:.3g} with {compared}",
        trained_ms=(before_ms, after_ms),
        whole=tuned.whole or fastest != tuned.own,
    )


def mean_step_ms(run: StarvationRun) -> float | None:
    """Return the mean time of a step since the measuring began, in milliseconds; None after too few steps."""
    return run.main.measurements(prefetch_active=None).stats.step_ms


def step_noise_ms(run: StarvationRun) -> float:
    """Return half the width of the 95 % interval of that mean, in milliseconds; 0.0 if it is unknown."""
    stats = run.main.measurements(prefetch_active=None).stats
    if stats.step_low_ms is None or stats.step_high_ms is None:
        return 0.0
    return (stats.step_high_ms - stats.step_low_ms) / 2
