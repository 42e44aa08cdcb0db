"""The search for the setting of a loader with which training is fastest. The search itself uses no clock and no loader.

A trial measures the time of a training step with a setting. Short trials explore numbers of workers: the user's own,
the same with batches in place, 0, 1, as many as could feed the model, more for as long as steps get shorter, then
numbers in between. The best settings compete in further turns, one after the other in each turn, so that other programs
on the machine disturb all of them alike. If the time is over before the search is, the most promising numbers have been
tried.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lightning_feed.load.settings import Setting

ALIKE = 1.03
"""Settings whose steps differ by less than this factor are equally fast: repeated trials differ as much."""
CLOSE = 1.15
"""Settings whose first trial is slower than the fastest by more than this factor do not compete in further turns."""
HOPELESS = 2.0
"""The user's setting does not compete in further turns if it is slower than the fastest by more than this factor."""
TURNS = 3
"""Trials of each setting that competes."""
FINALISTS = 4
"""Largest number of settings that compete."""
GAP = 1.15
"""No number of workers is tried between two numbers that differ by less than this factor."""
REFINEMENTS = 8
"""Largest number of trials around the fastest number of workers."""
UNLIKE = 1.25
"""Trials do not imitate a run if its own setting takes longer in them than in training by more than this factor, or
less long, and does so again."""
UNEVEN = 2.0
"""Longest wait for a batch, as a multiple of the mean, from which higher prefetch factors are tried."""
DEPTHS = (4, 8)
"""Prefetch factors to try if batches take unequal times. Torch's default is 2."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A setting and its measurements. Fields that are None are unknown."""

    setting: Setting
    steps_s: tuple[float, ...] = ()
    """Mean time of a training step in each turn, in seconds. Empty if the setting could not run."""
    start_share_s: float = 0.0
    """The share of each step in the start of an epoch's workers, in seconds: see :func:`start_share_s`."""
    unevenness: float | None = None
    """Longest time between two batches, as a multiple of the mean, over rounds of one batch for each worker."""
    start_s: float | None = None
    """Seconds from ``iter(loader)`` to the first batch."""
    batch_bytes: int | None = None
    """Bytes of tensors and arrays in a batch, the largest of the first batches."""
    batch_tensors: int | None = None
    """Number of tensors and arrays in a batch."""
    memory_bytes: int | None = None
    """Memory of all workers together."""
    infeasible: str | None = None
    """The reason why the setting could not run; None if it could."""

    @property
    def running_s(self) -> float:
        """Median time of a training step within an epoch over the turns; infinite if the setting could not run."""
        return statistics.median(self.steps_s) if self.steps_s else math.inf

    @property
    def step_s(self) -> float:
        """Median time of a training step with its share of the epoch's start; infinite if the setting could not run."""
        return self.running_s + self.start_share_s


def start_share_s(trial: Trial, steps_per_start: float) -> float:
    """Return the time that the start of an epoch adds to each of its steps, in seconds.

    Worker processes start anew in each epoch unless they persist. All other steps go on while batches are made.

    Args:
        trial: a trial of the setting.
        steps_per_start: steps of an epoch; infinite if starts do not count.
    """
    if not trial.setting.num_workers or trial.setting.persistent_workers or not trial.steps_s:
        return 0.0
    return max(0.0, (trial.start_s or 0.0) - trial.running_s) / steps_per_start


@dataclass(frozen=True, kw_only=True)
class Space:
    """The settings that may be tried."""

    own: Setting
    """The user's setting, which is always tried."""
    cpus: float
    """CPUs for one rank."""
    most_workers: int
    """Largest number of workers to try."""
    own_s: float | None = None
    """Time of a step within an epoch that training itself has measured with the user's setting; None if unknown."""
    copies: bool = False
    """True if training pins batches or copies them to a device, which trials do not: then its steps may be longer."""
    model_s: float = 0.0
    """Time of a training step that never waits for data; 0.0 if unknown."""
    in_place: bool = False
    """True if worker processes can leave batches in slots. Then they do so in all settings but the user's own."""
    number_stays: bool = False
    """True if only the user's number of workers may be tried, with and without batches in place."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The result of a search."""

    setting: Setting
    reason: str
    """The reason for the setting, in one sentence."""
    trials: tuple[Trial, ...]
    """All trials, in the order in which their settings were first tried."""
    finished: bool = True
    """False if the time ended the search before all was tried."""
    inconclusive: bool = False
    """True if nothing follows from the trials: they did not imitate training, or their turns disagree."""


class OutOfTime(Exception):
    """Raised in place of a trial for which no time is left."""


class Unlike(Exception):
    """Raised if the user's setting takes other times in trials than in training, so that trials prove nothing."""


Run = Callable[[Setting], Trial]
"""Runs one trial. Raises OutOfTime if there is no time left for it."""


def find_setting(space: Space, run: Run) -> Choice | None:
    """Search until the best setting is found, or the time is over. Returns None if no setting could run.

    The user's setting stays if trials do not imitate training.
    """
    search = _Search(space, run)
    finished = True
    try:
        search.explore()
        search.refine()
        search.try_depths()
        search.compete()
    except OutOfTime:
        finished = False
    except Unlike:
        return search.conclude_nothing()
    return search.choose(finished=finished)


class _Search:
    def __init__(self, space: Space, run: Run) -> None:
        self._space = space
        self._run = run
        self._trials: dict[Setting, Trial] = {}
        self._most = max(space.most_workers, space.own.num_workers)

    def explore(self) -> None:
        """Try the user's setting, then 0 workers, 1 worker, enough workers, and more for as long as steps get shorter.

        If the user's workers could leave batches in slots, but do not, as many workers that do so are tried second.
        Enough workers is the number that could feed the model if each were as fast as one worker alone; at most one per
        CPU. If steps are no shorter with enough workers than with 1 worker, the numbers that follow grow from 2.
        """
        own = self._space.own
        unlike = self._unlikeness(self._try(own))
        if UNLIKE < unlike < UNLIKE**2:
            unlike = self._unlikeness(self._try(own))
        if unlike > UNLIKE:
            raise Unlike
        if own.num_workers and self._with_workers(own.num_workers) != own:
            self._try(self._with_workers(own.num_workers))
        if self._space.number_stays:
            return
        self._try_workers(0)
        if not self._most:
            return
        alone = self._try_workers(1)
        if self._is_fed(alone):
            return
        enough = self._enough_workers(alone.running_s)
        with_enough = self._try_workers(enough)
        if self._is_fed(with_enough):
            return
        first = 2
        if ALIKE * with_enough.step_s < alone.step_s:
            first = 2 * enough
        self._grow(first, min(alone.step_s, with_enough.step_s))

    def _grow(self, first: int, fastest_s: float) -> None:
        """Try growing numbers of workers for as long as steps get shorter."""
        in_vain = 0
        for number in self._growing_numbers(first):
            trial = self._try_workers(number)
            if self._is_fed(trial):
                return
            in_vain += 1
            if ALIKE * trial.step_s < fastest_s:
                in_vain = 0
            fastest_s = min(fastest_s, trial.step_s)
            if in_vain == 2 or (in_vain == 1 and number >= self._space.cpus):
                return

    def refine(self) -> None:
        """Try numbers of workers between tried ones: around the fastest, then below the smallest that is as fast."""
        if self._space.number_stays:
            return
        for number in self._around_the_fastest():
            self._try_workers(number)
        while (smaller := self._below_the_smallest()) is not None:
            self._try_workers(smaller)

    def try_depths(self) -> None:
        """Try higher prefetch factors if some batches take much longer than others, and training waits for them."""
        if self._space.number_stays:
            return
        best = self._smallest_of_the_fastest()
        if best is None or not best.setting.num_workers or self._is_fed(best):
            return
        if (best.unevenness or 0.0) < UNEVEN:
            return
        for depth in DEPTHS:
            if depth > (best.setting.prefetch_factor or 0):
                self._try(replace(best.setting, prefetch_factor=depth))

    def compete(self) -> None:
        """Run further trials of the best settings, in turns."""
        finalists = self._finalists()
        if len(finalists) < 2:
            return
        for _ in range(TURNS - 1):
            for setting in finalists:
                self._try(setting)

    def choose(self, *, finished: bool) -> Choice | None:
        """Choose the user's setting if it is as fast as the fastest, else the smallest setting that is as fast.

        The user's setting also stays if the smallest was not faster in each turn. None if no setting could run.
        """
        best = self._smallest_of_the_fastest()
        if best is None:
            return None
        own = self._trials[self._space.own]
        fastest_s = min(trial.step_s for trial in self._trials.values())
        tried = f"{len(self._trials)} tried"
        disagree = False
        if own.step_s <= ALIKE * fastest_s:
            best = own
            reason = f"none of {tried} makes steps more than {ALIKE - 1:.0%} shorter"
        elif not self._is_faster_in_each_turn(best, own):
            reason = f"the turns disagree: {_in_ms(best)} with {best.setting}, {_in_ms(own)} with {own.setting}"
            best = own
            disagree = True
        elif best.step_s > fastest_s:
            reason = f"the smallest of {tried} within {ALIKE - 1:.0%} of the fastest"
        else:
            reason = f"the fastest of {tried}"
        if not finished:
            reason += "; the time ended the search"
        trials = tuple(self._trials.values())
        return Choice(setting=best.setting, reason=reason, trials=trials, finished=finished, inconclusive=disagree)

    def conclude_nothing(self) -> Choice:
        """Choose the user's setting, of which trials took other times than training itself."""
        own = self._trials[self._space.own]
        measured_ms = 1e3 * (self._space.own_s or 0.0)
        reason = f"with it, trials took {_in_ms(own)} a step and training {measured_ms:.3g}, so they would not tell"
        return Choice(setting=own.setting, reason=reason, trials=(own,), finished=False, inconclusive=True)

    @staticmethod
    def _is_faster_in_each_turn(best: Trial, own: Trial) -> bool:
        """Return True if a setting was faster than the user's own in each turn that both had."""
        turns = zip(best.steps_s, own.steps_s, strict=False)
        return all(best_s + best.start_share_s < own_s + own.start_share_s for best_s, own_s in turns)

    def _unlikeness(self, trial: Trial) -> float:
        """Return the factor by which the last turn of a trial of the user's setting differs from steps of training
        itself."""
        measured_s = self._space.own_s
        if measured_s is None or not trial.steps_s:
            return 1.0
        factor = trial.steps_s[-1] / measured_s
        if factor >= 1:
            return factor
        return 1.0 if self._space.copies else 1 / factor

    # --- trials so far ------------------------------------------------------------------------------------------------

    def _try(self, setting: Setting) -> Trial:
        """Run a trial, and return it with the step times of earlier trials of the same setting."""
        trial = self._run(setting)
        before = self._trials.get(setting)
        if before is not None:
            shares_s = [each.start_share_s for each in (before, trial) if each.steps_s]
            trial = replace(trial, steps_s=(*before.steps_s, *trial.steps_s), start_share_s=min(shares_s, default=0.0))
        self._trials[setting] = trial
        if trial.infeasible:  # fewer workers may meet the same limit
            self._most = min(self._most, setting.num_workers // 2)
        return trial

    def _try_workers(self, number: int) -> Trial:
        """Try a number of workers, unless it was tried already. Returns its fastest trial."""
        trial = self._by_number().get(number)
        if trial is not None:
            return trial
        return self._try(self._with_workers(number))

    def _with_workers(self, number: int) -> Setting:
        """Return the user's setting with a number of workers, and with batches in place if possible."""
        setting = self._space.own.with_workers(number)
        return replace(setting, in_place=self._space.in_place and number > 0)

    def _by_number(self) -> dict[int, Trial]:
        """Return the fastest trial of each number of workers. Numbers that could not run are left out."""
        trials = sorted(self._trials.values(), key=lambda trial: -trial.step_s)
        return {trial.setting.num_workers: trial for trial in trials if trial.steps_s}

    def _is_fed(self, trial: Trial) -> bool:
        """Return True if training never waits for data within an epoch."""
        return trial.running_s <= ALIKE * self._space.model_s

    def _smallest_of_the_fastest(self) -> Trial | None:
        trials = [trial for trial in self._trials.values() if trial.steps_s]
        if not trials:
            return None
        limit_s = ALIKE * min(trial.step_s for trial in trials)
        return min((trial for trial in trials if trial.step_s <= limit_s), key=lambda trial: _size(trial.setting))

    def _finalists(self) -> list[Setting]:
        """Return the settings that compete: the user's, the smallest as fast as the fastest, and others nearly as fast.

        The user's setting does not compete if it is much slower than the fastest.
        """
        smallest = self._smallest_of_the_fastest()
        if smallest is None:
            return []
        trials = sorted(self._trials.values(), key=lambda trial: trial.step_s)
        fastest_s = trials[0].step_s
        close = [trial.setting for trial in trials if trial.step_s <= CLOSE * fastest_s]
        wanted = [smallest.setting, *close]
        if self._trials[self._space.own].step_s <= HOPELESS * fastest_s:
            wanted.insert(0, self._space.own)
        return list(dict.fromkeys(wanted))[:FINALISTS]

    # --- what to try next ---------------------------------------------------------------------------------------------

    def _enough_workers(self, alone_s: float) -> int:
        """Return the number of workers that could feed the model if one needs ``alone_s`` for a batch; at most one per
        CPU."""
        enough = max(1, round(self._space.cpus))
        if alone_s < enough * self._space.model_s:
            enough = math.ceil(alone_s / self._space.model_s)
        return max(1, min(enough, self._most))

    def _growing_numbers(self, first: int) -> Iterator[int]:
        """Yield the numbers of workers that double from ``first`` to the largest allowed, with the number of CPUs in
        between."""
        cpus = max(1, round(self._space.cpus))
        number = first
        while number <= self._most:
            yield number
            following = 2 * number
            number = cpus if number < cpus < following else following
        if 1 < self._most < number < 2 * self._most:
            yield self._most

    def _around_the_fastest(self) -> Iterator[int]:
        """Yield the numbers of workers halfway between the fastest and the nearest tried numbers, until these are
        close."""
        for _ in range(REFINEMENTS):
            trials = self._by_number()
            numbers = sorted(number for number in trials if number)
            if not numbers:
                return
            fastest = min(numbers, key=lambda number: trials[number].step_s)
            if self._is_fed(trials[fastest]):
                return
            middles = _middles_around(fastest, numbers)
            untried = [number for number in middles if number not in trials]
            if not untried or untried[0] > self._most:
                return
            yield untried[0]

    def _below_the_smallest(self) -> int | None:
        """Return a number of workers to try: between the smallest as fast as the fastest, and the next smaller one
        tried.

        Returns None if there is nothing to try between the two.
        """
        best = self._smallest_of_the_fastest()
        if best is None or best.setting.num_workers < 2:
            return None
        tried = self._by_number()
        slower = max((number for number in tried if number < best.setting.num_workers), default=0)
        middle = _middle(max(1, slower), best.setting.num_workers)
        return None if middle in tried else middle


def _middles_around(fastest: int, numbers: list[int]) -> list[int]:
    """Return the middles between a number and its neighbours: the next larger one, then the next smaller one."""
    position = numbers.index(fastest)
    middles = [_middle(fastest, above) for above in numbers[position + 1 : position + 2]]
    middles += [_middle(below, fastest) for below in numbers[max(0, position - 1) : position]]
    return [middle for middle in middles if middle is not None]


def _middle(low: int, high: int) -> int | None:
    """Return the geometric middle of two numbers of workers; None if they are close to each other."""
    middle = round(math.sqrt(low * high))
    if low < middle < high and high > GAP * low:
        return middle
    return None


def _in_ms(trial: Trial) -> str:
    """Return the step times of all turns: ``31.2, 45.0, 33.1 ms``."""
    return ", ".join(f"{1e3 * step_s:.3g}" for step_s in trial.steps_s) + " ms"


def _size(setting: Setting) -> tuple[int, int]:
    """Return the sort key of a setting: number of workers, then prefetch factor."""
    return setting.num_workers, setting.prefetch_factor or 0
