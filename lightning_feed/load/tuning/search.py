"""Which setting to try next, and which to take: no clock, no loader, only what trials gave.

The first trial has no workers. Where it leads, :mod:`lightning_feed.load.tuning.scaling` says; a few trials around the
knee decide, and only what was tried is taken.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_feed.load.tuning.lookahead import EVEN, far_enough, prefetch_for, unevenness
from lightning_feed.load.tuning.scaling import NOISE, UNEVEN_NOISE, Floats, Probe, Scaling
from lightning_feed.load.tuning.values import Goal, Kind, Setting, Trial

SPARE = 1.1
"""A setting meets the demand when it gives so much of it: rates vary, and the model must never wait."""
TIE = 0.03
"""Settings this close, as a share, are equally fast; the smaller one is taken."""
FED_PCT = 2.0
"""Below this starvation a loader without workers, which takes turns with the model, will do."""
_GAIN = 0.004
"""A further trial must promise so much more, as a share, weighed over all curves."""
_PER_DOUBLING = {True: 0.03, False: 0.01}
"""What twice the workers must bring to be worth it, as a share, with a demand that is met and without one."""
_BLOCKED_PCT = 25.0
"""From this head-of-line share on another order is worth a trial."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a loader can be given."""

    cpus: float
    """For one rank."""
    most_workers: int
    kinds: tuple[Kind, ...] = ("process",)
    none: bool = True
    """Whether it may go without workers."""
    pin_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the search ends with."""

    trial: Trial
    """Of the setting to take."""
    reason: str
    options: tuple[str, ...] = ()


class Search:
    """Ask for a setting, try it, tell what it gave, and ask again until there is none.

    Attributes:
        trials: told so far.
        rejected: settings that were not tried because they would have broken a limit, and which limit.

    Args:
        offer: what the loader can be given.
        goal: the demand, and how many trials there may be.
        broken: the limit of the machine that a setting would break, as a sentence, empty for none. It is also given
            the trials so far, which say how large a batch and a worker are.
    """

    def __init__(self, offer: Offer, goal: Goal, broken: Callable[[Setting, Sequence[Trial]], str]) -> None:
        self.trials: list[Trial] = []
        self.rejected: list[tuple[Setting, str]] = []
        self._offer, self._goal, self._broken = offer, goal, broken
        self._probe: Probe | None = None
        self._roof: dict[Kind, int] = dict.fromkeys(offer.kinds, offer.most_workers)
        self._asked: Setting | None = None

    def next_setting(self) -> Setting | None:
        """The setting to try next; None when the search is over."""
        if len(self.trials) >= self._goal.max_trials:
            return None
        if not self.trials:
            self._asked = Setting(num_workers=0, prefetch_factor=None, pin_memory=self._offer.pin_memory)
        else:
            self._asked = self._more_workers() or self._deeper() or self._another_order()
        return self._asked

    def take(self, trial: Trial) -> None:
        """What the setting gave that was asked for last.

        Raises:
            ValueError: for a trial of another setting.
        """
        if trial.setting != self._asked:
            raise ValueError(f"{trial.setting} was tried, and {self._asked} was asked for")
        self.trials.append(trial)
        kind, workers = trial.setting.workers, trial.setting.num_workers
        if trial.batches_per_s is None:
            self._roof[kind] = min(self._roof[kind], workers // 2)  # what killed it is near with fewer, too
        elif not workers:
            self._probe = Probe.of(trial)

    def found(self) -> Found | None:
        """The setting to take of those tried; None when none of them could run."""
        ran = self._ran()
        if not ran:
            return None
        met = [trial for trial in ran if self._meets(trial)]
        if met:
            taken = min(met, key=_size)
        else:
            shallow = [trial for trial in ran if self._was_tried_deeper(trial)]
            likely = self._likely([trial for trial in ran if trial not in shallow])
            equal = [trial for trial in ran if likely.get(id(trial), 0.0) >= (1 - TIE) * max(likely.values())]
            telling = [trial for kind in self._offer.kinds for trial in self._telling(kind)]
            # With too little ahead a trial without slow batches looks as good as one that would stand them.
            taken = min(
                [trial for trial in equal if trial in telling or not trial.setting.num_workers] or equal, key=_size
            )
        return Found(trial=taken, reason=self._reason(taken, ran), options=self._options(taken))

    def effective(self, trial: Trial) -> float:
        """Batches per second that training gets from a loader, were the model free: those of the loader, except that
        one without workers takes turns with the model."""
        rate, demand = trial.batches_per_s or 0.0, self._goal.demand_per_s
        if demand is None or trial.setting.num_workers or not rate:
            return rate
        return 1 / (1 / rate + 1 / demand)

    def _likely(self, ran: list[Trial]) -> dict[int, float]:
        """What each trial's setting gives, by its id: half by what was measured, half by the curves that all trials
        make likely. A trial that was lucky by a few per cent must not decide."""
        likely = {id(trial): self._given(trial) for trial in ran}
        for kind in self._offer.kinds:
            scaling = self._scaling(kind)
            for trial in ran if scaling is not None else ():
                setting = trial.setting
                if scaling is None or not setting.num_workers or setting.workers != kind or not setting.in_order:
                    continue
                curve = min(scaling.expected(setting.num_workers), SPARE * (self._goal.demand_per_s or math.inf))
                likely[id(trial)] = math.sqrt(likely[id(trial)] * curve)
        return likely

    def _ran(self) -> list[Trial]:
        ran = [trial for trial in self.trials if trial.batches_per_s is not None]
        with_workers = [trial for trial in ran if trial.setting.num_workers]
        return ran if self._offer.none or not with_workers else with_workers

    def _meets(self, trial: Trial) -> bool:
        demand = self._goal.demand_per_s
        if demand is None or trial.batches_per_s is None:
            return False
        if trial.setting.num_workers == 0:
            return 100 * (1 - self.effective(trial) / demand) <= FED_PCT
        return trial.batches_per_s >= SPARE * demand

    def _given(self, trial: Trial) -> float:
        """What counts of a rate: more than the demand asks for is worth nothing."""
        demand = self._goal.demand_per_s
        rate = self.effective(trial)
        if demand is None:
            return rate
        return SPARE * demand if self._meets(trial) else min(rate, SPARE * demand)

    def _scaling(self, kind: Kind) -> Scaling | None:
        """What is known of workers of a kind."""
        counts = _counts(self._offer.most_workers)
        if self._probe is None or not counts:
            return None
        scaling = Scaling(self._probe, self._offer.cpus, counts, kind)
        noise = UNEVEN_NOISE if self._unevenness(kind) > EVEN else NOISE
        for trial in self._telling(kind):
            scaling.learn(trial.setting.num_workers, trial.batches_per_s or 0.0, noise)
        return scaling

    def _telling(self, kind: Kind) -> list[Trial]:
        """Trials that tell how workers of a kind scale: those that loaded as much ahead as is now thought right."""
        telling = []
        for trial in self._ran():
            setting = trial.setting
            if setting.num_workers and setting.workers == kind and setting.in_order:
                now = self._fitting(self._setting(kind, setting.num_workers))
                if now is None or far_enough(setting, now):
                    telling.append(trial)
        return telling

    def _worth(self, rates: Floats, workers: Floats) -> Floats:
        """Of rates at numbers of workers, in shares: 0.01 is 1 % more speed."""
        demand = self._goal.demand_per_s
        value = np.log(rates) if demand is None else np.minimum(0.0, np.log(rates / (SPARE * demand)))
        worth: Floats = value - _PER_DOUBLING[demand is not None] * np.log2(1 + workers)
        return worth

    def _more_workers(self) -> Setting | None:
        """The number of workers that promises most, where it promises enough."""
        ran = [trial for trial in self._ran() if trial.setting.num_workers or self._offer.none]
        best = -math.inf
        if ran:
            given = np.array([self._given(trial) for trial in ran])
            best = float(self._worth(given, np.array([float(trial.setting.num_workers) for trial in ran])).max())
        found: list[tuple[float, Setting]] = []
        for kind in self._offer.kinds:
            scaling = self._scaling(kind)
            if scaling is None:
                continue
            counts = np.asarray(scaling.workers, dtype=np.float64)
            worth = self._worth(scaling.rates, counts)
            gains = worth if best == -math.inf else np.maximum(0.0, worth - best)
            for workers, gain in zip(scaling.workers, scaling.weights @ gains, strict=True):
                if workers <= self._roof[kind]:
                    found.append((float(gain), self._setting(kind, workers)))
        untried = [
            kind for kind in self._offer.kinds if all(trial.setting.workers != kind for trial in self.trials[1:])
        ]
        if 0 < len(untried) < len(self._offer.kinds) and not any(self._meets(trial) for trial in ran):
            found = [one for one in found if one[1].workers in untried]  # what threads can do nothing else tells
        enough = _GAIN if self._settled() else 0.0
        for gain, setting in sorted(found, key=lambda one: -one[0]):
            if best > -math.inf and gain < enough:
                return None
            fitting = self._fitting(setting)
            if fitting is not None and not self._was_tried(fitting):
                return fitting
        return None

    def _was_tried_deeper(self, trial: Trial) -> bool:
        """Whether the same setting was tried with more ahead because this was found too little."""
        setting = trial.setting
        return any(
            replace(other.setting, prefetch_factor=setting.prefetch_factor) == setting
            and not far_enough(setting, other.setting)
            for other in self._ran()
        )

    def _settled(self) -> bool:
        """Whether the best so far may be the end: of a demand that is not met, one trial with workers says too little,
        unless it did worse than none."""
        found = self.found()
        if found is None or not found.trial.setting.num_workers or self._meets(found.trial):
            return True
        return sum(len(self._telling(kind)) for kind in self._offer.kinds) > 1

    def _was_tried(self, setting: Setting) -> bool:
        """With as many workers, and as much ahead."""
        return any(
            (trial.setting.workers, trial.setting.num_workers) == (setting.workers, setting.num_workers)
            and far_enough(trial.setting, setting)
            for trial in self.trials
        )

    def _setting(self, kind: Kind, workers: int) -> Setting:
        return Setting(
            num_workers=workers,
            prefetch_factor=self._prefetch(kind, workers),
            workers=kind,
            pin_memory=self._offer.pin_memory,
        )

    def _unevenness(self, kind: Kind) -> float:
        return 1.0 if self._probe is None else unevenness(self._probe, self.trials, kind, self._offer.cpus)

    def _prefetch(self, kind: Kind, workers: int) -> int:
        demand = self._goal.demand_per_s
        # A model that is slower than the workers empties the queue more slowly.
        slower = 1.0 if demand is None or self._probe is None else demand * self._probe.worker_s / workers
        return prefetch_for(self._unevenness(kind) * min(1.0, slower))

    def _fitting(self, setting: Setting) -> Setting | None:
        """The setting, with less loaded ahead if need be; None where the machine has no room for it at all."""
        for prefetch in range(setting.prefetch_factor or 1, 0, -1):
            fitting = replace(setting, prefetch_factor=prefetch)
            why = self._broken(fitting, self.trials)
            if not why:
                return fitting
            if all(fitting != rejected for rejected, _ in self.rejected):
                self.rejected.append((fitting, why))
        return None

    def _deeper(self) -> Setting | None:
        """The best setting with more loaded ahead, where a slow batch was seen to take longer than that lasts."""
        found = self.found()
        if found is None or not found.trial.setting.num_workers:
            return None
        setting = found.trial.setting
        wanted = self._prefetch(setting.workers, setting.num_workers)
        fitting = self._fitting(replace(setting, prefetch_factor=wanted))
        deeper = fitting is not None and not far_enough(setting, fitting)
        return fitting if deeper and not any(trial.setting == fitting for trial in self.trials) else None

    def _another_order(self) -> Setting | None:
        found = self.found()
        if found is None or not self._goal.may_reorder or not _held_up(found.trial) or self._meets(found.trial):
            return None
        setting = replace(found.trial.setting, in_order=False)
        return None if any(trial.setting == setting for trial in self.trials) else setting

    def _options(self, taken: Trial) -> tuple[str, ...]:
        if self._goal.may_reorder or not _held_up(taken) or self._meets(taken):
            return ()
        return (
            f"in_order=False: {taken.head_of_line_pct:.0f} % of the time a later batch was ready while the next one "
            "was waited for. It lets that one be overtaken, and leaves the order of the batches to chance.",
        )

    def _reason(self, taken: Trial, ran: list[Trial]) -> str:
        demand, workers = self._goal.demand_per_s, taken.setting.num_workers
        if demand is not None and self._meets(taken):
            if workers == 0:
                load_ms, step_ms = 1e3 / (taken.batches_per_s or 1), 1e3 / demand
                return f"loading adds {load_ms:.3g} ms to steps of {step_ms:.3g} ms: workers would have little to gain"
            return (
                f"the smallest tried that gives the {demand:.4g} batches/s that the model can take, and "
                f"{SPARE - 1:.0%} to spare"
            )
        fastest = max(ran, key=self._given)
        if fastest is taken:
            why = f"the fastest of {len(self.trials)} tried"
        else:
            gain = self._given(fastest) / self._given(taken) - 1
            why = f"the smallest of {len(self.trials)} tried that is within {TIE:.0%} of the fastest ({gain:.1%})"
        if demand is not None:
            why += f"; the model could take {demand:.4g} batches/s"
        return why


def _counts(most: int) -> list[int]:
    """Numbers of workers that may be tried: all to 16, then in steps of a seventh."""
    counts, now = [], 1
    while now <= most:
        counts.append(now)
        now = now + 1 if now < 16 else math.ceil(now * 8 / 7)
    if counts and counts[-1] != most:
        counts.append(most)
    return counts


def _size(trial: Trial) -> tuple[int, int, float]:
    """What makes a setting small: workers, then batches ahead; of equal ones the faster is taken."""
    return trial.setting.num_workers, trial.setting.prefetch_factor or 0, -(trial.batches_per_s or 0.0)


def _held_up(trial: Trial) -> bool:
    return trial.setting.num_workers > 1 and trial.setting.in_order and (trial.head_of_line_pct or 0.0) >= _BLOCKED_PCT
