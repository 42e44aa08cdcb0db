"""The search for a loader's setting: which one to try next, and which one to take. Pure: no clock, no loader.

The first trial has no workers. It says how long a worker needs for a batch, and how many workers keep the CPUs busy:
the next trial has so many, and each further one more or fewer, where the rates so far say that this may be faster.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape

from lightning_feed.errors import SettingsError, throughput
from lightning_feed.load.settings import TORCH_PREFETCH, LoaderSettings
from lightning_feed.trials.trial import Kind, Setting, Trial

SPARE = 1.1
"""A setting meets the demand when it gives so much of it: rates vary, and the model must never wait."""
TIE = 0.02
"""Settings this close, as a share, are equally fast; the smaller one is taken."""
FED_PCT = 2.0
"""Below this starvation a loader without workers, which takes turns with the model, will do."""
MOST_PREFETCH = 8
_PER_CPU = 1.25
"""Workers for each that would compute all the time: with as many as CPUs, some CPUs are idle now and then."""
_IN_PROPORTION = 0.7
"""From this share of what as many separate workers would give, more of them are worth a trial."""
_IN_THE_WAY = 0.6
"""Below it, fewer may give as much."""
KEEP = 0.10
"""A given setting is kept unless another gives more by this share: rates vary by as much from trial to trial."""
TURNS = 0.8
"""Weight of the rate without workers where the demand is not known: the loader and the model take turns."""
_BUSY = 0.95
"""Share of what the CPUs can give at all, from which more workers are not worth a trial."""
_CLOSE = 0.85
"""Share of the best rate, from which further trials of the other kind of workers are worth it."""
_EVEN = 2.0
"""A slow batch that takes up to so many times as long as a usual one is covered by torch's prefetch factor."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The target of tuning, and its limits.

    Raises:
        SettingsError: for values that leave nothing to try.
    """

    demand_per_s: float | None = None
    """Batches per second that the model can take; None: not known, so the fastest setting is looked for."""
    local_ranks: int = 1
    """Training processes on this machine, which all load at once."""
    device_type: str = "cpu"
    """The type of the device that the batches go to, as in ``torch.device.type``."""
    budget_s: float = 30.0
    """No trial is begun later than this; one that runs is cut short."""
    max_trials: int = 5
    """The first, without workers, included."""
    most_workers: int | None = None
    """Never more than this; None: 16, or twice the CPUs if that is more."""
    may_persist: bool = True
    """True if workers may live on from epoch to epoch; False where the Trainer reloads the loaders."""
    threads: bool = True
    """True if worker threads may be tried, where the loader can have them."""
    given: Setting | None = None
    """The loader's own setting, which is tried too, and kept unless another is clearly faster; None: any will do."""

    def __post_init__(self) -> None:
        for name in ("demand_per_s", "budget_s", "max_trials"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SettingsError(f"{name}={value!r} is not possible. Give a number above 0.")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The settings that a loader can have."""

    cpus: float
    """For one rank."""
    most_workers: int
    kinds: tuple[Kind, ...] = ("process",)
    pin_memory: bool = False
    may_persist: bool = False
    """True if worker processes may live on from epoch to epoch, which saves starting them again."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The setting that was found, and what led to it."""

    setting: Setting
    reason: str
    """The reason for it, in one sentence."""
    trials: tuple[Trial, ...]
    """In the order in which they were run."""
    rejected: tuple[tuple[Setting, str], ...] = ()
    """Settings that would have broken a limit of the machine, and which."""
    demand_per_s: float | None = None
    """Batches per second that the model can take; None: not known, so the fastest setting was looked for."""
    batch_size: int | None = None
    batches_per_s: float | None = None
    """Rate of the chosen setting."""
    starved_pct: float | None = None
    """Predicted: 100 * (1 - rate / demand_per_s), 0 or more; None without a demand. The rate is ``batches_per_s``;
    without workers, where loading and training take turns, 1 / (1 / batches_per_s + 1 / demand_per_s)."""
    remembered: bool = False
    """True if it was found by an earlier run, and only checked by this one."""
    seconds: float = 0.0
    """Duration of the whole tuning."""

    def __repr__(self) -> str:
        return f"<Tuned: {self._line(self.setting, self.batches_per_s)}; {self.reason}>"

    def _repr_html_(self) -> str:
        """The form that a notebook shows."""
        rows = [f"<tr><td>{escape(self._line(one.setting, one.batches_per_s))}</td></tr>" for one in self.trials]
        found = escape(self._line(self.setting, self.batches_per_s))
        return f"<p><b>{found}</b><br>{escape(self.reason)}</p><table>{''.join(rows)}</table>"

    def _line(self, setting: Setting, per_s: float | None) -> str:
        return f"{setting}: {'could not run' if per_s is None else throughput(per_s, self.batch_size)}"

    @property
    def settings(self) -> LoaderSettings:
        """The setting as settings of a FastDataModule."""
        values = asdict(self.setting)
        if values["prefetch_factor"] is None:
            values["prefetch_factor"] = "auto"
        return LoaderSettings(**values)


class Search:
    """Proposes one setting after the other, each by the results of those before.

    Attributes:
        trials: the results so far.
        rejected: settings that were not tried because they would have broken a limit, and which limit.

    Args:
        offer: the settings that the loader can have.
        goal: the demand, and how many trials there may be.
        broken: the limit of the machine that a setting would break, as a sentence, empty for none. It is also given
            the trials so far, which say how large a batch and a worker are.
    """

    def __init__(self, offer: Offer, goal: Goal, broken: Callable[[Setting, Sequence[Trial]], str]) -> None:
        self.trials: list[Trial] = []
        self.rejected: dict[Setting, str] = {}
        self._offer, self._goal, self._broken = offer, goal, broken
        self._most: dict[Kind, int] = dict.fromkeys(offer.kinds, offer.most_workers)

    def next_setting(self) -> Setting | None:
        """The setting to try next; None when the search is over."""
        if not self.trials:
            return Setting(num_workers=0, prefetch_factor=None, pin_memory=self._offer.pin_memory)
        if len(self.trials) >= self._goal.max_trials or self.trials[0].batches_per_s is None:
            return None
        given = self._goal.given
        if len(self.trials) == 1 and given is not None and given.num_workers and not self._broken(given, self.trials):
            return given
        best = self._best()
        if self._meets(best) and not best.setting.num_workers:
            return None
        kinds = [best.setting.workers] if self._meets(best) else self._promising_kinds(best)
        found = (self._untried(kind, workers) for kind in kinds for workers in self._promising_counts(kind))
        return next(filter(None, found), None)

    def take(self, trial: Trial) -> None:
        """Learn what a setting gave."""
        self.trials.append(trial)
        if trial.batches_per_s is None:  # what killed it is near with fewer workers, too
            self._most[trial.setting.workers] = trial.setting.num_workers // 2

    def found(self) -> Tuned | None:
        """The setting to take of those tried; None when none of them could run."""
        if all(trial.batches_per_s is None for trial in self.trials):
            return None
        best, demand = self._given_if_fast() or self._best(), self._goal.demand_per_s
        return Tuned(
            setting=best.setting,
            reason=self._reason(best),
            trials=tuple(self.trials),
            rejected=tuple(self.rejected.items()),
            demand_per_s=demand,
            batches_per_s=best.batches_per_s,
            starved_pct=None if demand is None else max(0.0, 100 * (1 - self._effective(best) / demand)),
        )

    # --- what was measured --------------------------------------------------------------------------------------------

    def _of(self, kind: Kind) -> list[Trial]:
        return [trial for trial in self.trials if trial.setting.num_workers and trial.setting.workers == kind]

    def _meets(self, trial: Trial) -> bool:
        demand = self._goal.demand_per_s
        if demand is None or trial.batches_per_s is None:
            return False
        if trial.setting.num_workers == 0:
            return 100 * (1 - self._effective(trial) / demand) <= FED_PCT
        return trial.batches_per_s >= SPARE * demand

    def _effective(self, trial: Trial) -> float:
        """Batches per second that training gets from a loader, were the model free: those of the loader, except that
        one without workers takes turns with the model."""
        rate, demand = trial.batches_per_s or 0.0, self._goal.demand_per_s
        if trial.setting.num_workers or not rate:
            return rate
        return TURNS * rate if demand is None else 1 / (1 / rate + 1 / demand)

    def _best(self) -> Trial:
        """The smallest that meets the demand; where none does, the smallest of the fastest."""
        ran = [trial for trial in self.trials if trial.batches_per_s is not None]
        enough = [trial for trial in ran if self._meets(trial)]
        return self._smallest(enough or ran)

    def _smallest(self, trials: list[Trial]) -> Trial:
        """The smallest of the fastest, within the tie."""
        fastest = max(min(self._effective(trial), self._wanted_per_s()) for trial in trials)
        return min((trial for trial in trials if self._effective(trial) >= (1 - TIE) * fastest), key=_size)

    def _given_if_fast(self) -> Trial | None:
        """The trial of the given setting, where no other gives clearly more; None where one does."""
        ran = [trial for trial in self.trials if trial.batches_per_s is not None]
        fastest = max(map(self._effective, ran))
        near = (trial for trial in ran if self._effective(trial) >= (1 - KEEP) * fastest)
        return next((trial for trial in near if trial.setting == self._goal.given), None)

    @property
    def _worker_s(self) -> float:
        """Seconds that one worker alone needs for a batch, from the trial without workers."""
        probe = self.trials[0]
        return max(1 / (probe.batches_per_s or 1.0), probe.cpu_s_per_batch or 0.0)

    @property
    def _cpu_s(self) -> float:
        return self.trials[0].cpu_s_per_batch or self._worker_s

    # --- what to try next ---------------------------------------------------------------------------------------------

    def _wanted_per_s(self) -> float:
        return math.inf if self._goal.demand_per_s is None else SPARE * self._goal.demand_per_s

    def _promising_kinds(self, best: Trial) -> list[Kind]:
        """The kinds of workers that are nearly as fast as the best, or untried; the fastest first."""
        fastest = {kind: max(map(self._effective, self._of(kind)), default=math.inf) for kind in self._offer.kinds}
        near = [kind for kind in fastest if fastest[kind] >= _CLOSE * self._effective(best)]
        return sorted(near, key=lambda kind: -fastest[kind])

    def _promising_counts(self, kind: Kind) -> list[int]:
        """Workers of a kind to try: as many as its best trial had, with more ahead if need be, then more or fewer."""
        ran = [trial for trial in self._of(kind) if trial.batches_per_s]
        if not ran:  # as many as meet the demand, or keep the CPUs busy if that takes fewer
            for_cpus = _PER_CPU * self._offer.cpus * self._worker_s / self._cpu_s
            return [math.ceil(min(for_cpus, self._wanted_per_s() * self._worker_s, self._offer.most_workers))]
        best = self._smallest(ran)
        workers, rate = best.setting.num_workers, best.batches_per_s or 0.0
        if self._meets(best):
            return [workers, min(workers, math.ceil(workers * self._wanted_per_s() / rate))]
        tried = [trial.setting.num_workers for trial in self._of(kind)]
        alone = rate * self._worker_s / workers  # share of what as many separate ones would give
        if alone < _IN_THE_WAY and workers == min(tried):
            return [workers, max(1, round(_PER_CPU * alone * workers))]
        idle = rate < _BUSY * self._offer.cpus / self._cpu_s
        if workers == max(tried) and (alone >= _IN_PROPORTION or (idle and (len(tried) > 1 or kind == "thread"))):
            more = min(2.0 * workers, 1.1 * workers * self._wanted_per_s() / rate)
            return [workers, max(workers + 1, math.ceil(more))]
        return [workers]

    def _untried(self, kind: Kind, workers: int) -> Setting | None:
        """The setting with so many workers, or with as many as there is room for. None where it was tried, or the
        machine has no room for workers at all."""
        workers = min(max(workers, 1), self._most[kind])
        for count in range(workers, 0, -1):
            wanted = self._prefetch(kind, count)
            for prefetch in range(wanted, 0, -1):
                setting = Setting(
                    num_workers=count,
                    prefetch_factor=prefetch,
                    workers=kind,
                    persistent_workers=self._offer.may_persist and kind == "process",
                    pin_memory=self._offer.pin_memory,
                )
                why = self._broken(setting, self.trials)
                if not why:
                    return None if self._was_tried(setting) else setting
                if count == workers and prefetch == wanted:
                    self.rejected.setdefault(setting, why)
        return None

    def _was_tried(self, setting: Setting) -> bool:
        """Check if as many workers were tried, with as many batches ahead or at least more than by default."""
        enough = min(setting.prefetch_factor or 0, TORCH_PREFETCH + 1)
        return any(
            trial.setting.num_workers == setting.num_workers and (trial.setting.prefetch_factor or 0) >= enough
            for trial in self._of(setting.workers)
        )

    def _prefetch(self, kind: Kind, workers: int) -> int:
        """Batches that each worker loads ahead: as many as last while one of them makes a slow batch.

        Twice the slow one: the next may come before the queue is full again. Threads make a slow batch together.
        """
        if kind == "thread":
            return TORCH_PREFETCH
        # A model that is slower than the workers empties the queue more slowly.
        slower = 1.0 if self._goal.demand_per_s is None else self._goal.demand_per_s * self._worker_s / workers
        uneven = self._unevenness() * min(1.0, slower)
        return TORCH_PREFETCH if uneven <= _EVEN else min(MOST_PREFETCH, math.ceil(2 * uneven))

    def _unevenness(self) -> float:
        """The time of a slow batch as a multiple of the usual one: 1 where all are alike.

        From 99th percentiles, not from means: in order, all workers wait for the one that makes a slow batch.
        """
        probe = self.trials[0]
        uneven = (probe.gap_p99_s or 0.0) * (probe.batches_per_s or 0.0)
        for trial in self._of("process"):
            workers, gap_s = trial.setting.num_workers, trial.gap_p99_s or 0.0
            # Even batches of workers in step come all at once, after the time of one: longer gaps are of slow ones.
            if gap_s * (trial.batches_per_s or 0.0) > _EVEN * workers:
                usual_s = max(self._worker_s, workers * self._cpu_s / self._offer.cpus)
                uneven = max(uneven, gap_s / usual_s)
        return uneven

    # --- what to say --------------------------------------------------------------------------------------------------

    def _reason(self, best: Trial) -> str:
        demand, tried = self._goal.demand_per_s, len(self.trials)
        if best.setting == self._goal.given:
            return f"none of {tried} tried is {KEEP:.0%} faster"
        if demand is not None and self._meets(best):
            if best.setting.num_workers == 0:
                load_ms, step_ms = 1e3 / (best.batches_per_s or 1), 1e3 / demand
                return f"loading adds {load_ms:.3g} ms to steps of {step_ms:.3g} ms: workers would have little to gain"
            return f"the smallest tried that gives what the model can take, and {SPARE - 1:.0%} to spare"
        gain = max(self._effective(trial) for trial in self.trials) / self._effective(best) - 1
        why = f"the fastest of {tried} tried"
        if gain > 0:
            why = f"the smallest of {tried} tried that is within {TIE:.0%} of the fastest ({gain:.1%})"
        return why if demand is None else f"{why}; with {SPARE - 1:.0%} to spare, the model could take more"


def _size(trial: Trial) -> tuple[int, int, float]:
    """The key by which settings are small: workers, then prefetched batches; of equal ones the faster."""
    return trial.setting.num_workers, trial.setting.prefetch_factor or 0, -(trial.batches_per_s or 0.0)
