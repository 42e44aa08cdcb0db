"""The search for a loader's setting: proposes trials and selects the result. Pure: no clock, no loader.

The first trial has no workers. It measures a worker's time per batch, which gives the number of workers that keep the
CPUs busy. A later trial has this number, or fewer if these meet the demand. Further trials have more or fewer workers,
if the rates so far suggest that this is faster.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape

from lightning_feed.errors import SettingsError, throughput
from lightning_feed.load.settings import TORCH_PREFETCH, LoaderSettings
from lightning_feed.trials.trial import Kind, Setting, Trial

SPARE = 1.1
"""Factor on the demand that a sufficient setting must deliver: rates vary, and the model must never wait."""
TIE = 0.02
"""Settings whose rates differ by at most this share are equally fast. The smaller one is taken."""
FED_PCT = 2.0
"""Starvation below which a loader without workers, which takes turns with the model, is good enough."""
MOST_PREFETCH = 8
_PER_CPU = 1.25
"""Factor on the number of workers that would fill the CPUs if always busy. Without it, CPUs are idle at times."""
_IN_PROPORTION = 0.7
"""Share of the ideal rate (all workers independent) above which more workers are worth a trial."""
_IN_THE_WAY = 0.6
"""Share of the ideal rate below which fewer workers may be as fast."""
KEEP = 0.10
"""The user's setting is kept unless another is faster by this share, about the spread between trials."""
TURNS = 0.8
"""Weight of the rate without workers if the demand is unknown, because loader and model then take turns."""
_BUSY = 0.95
"""Share of the CPUs' maximal rate above which more workers are not worth a trial."""
_CLOSE = 0.85
"""Share of the best rate above which the other kind of workers is worth further trials."""
_EVEN = 2.0
"""Longest slow batch, in multiples of a usual batch, that torch's default prefetch factor covers."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Target and limits of tuning.

    Raises:
        SettingsError: the values leave nothing to try.
    """

    demand_per_s: float | None = None
    """Batches per second that the model can consume. None: unknown, so tuning finds the fastest setting."""
    local_ranks: int = 1
    """Number of training processes on this machine, all loading at once."""
    device_type: str = "cpu"
    """Type of the batches' target device, as in ``torch.device.type``."""
    budget_s: float = 30.0
    """Seconds for all trials. No trial starts later, and a running one is cut short."""
    max_trials: int = 5
    """Largest number of trials, including the first one, without workers."""
    most_workers: int | None = None
    """Largest number of workers. None: 16 (4 with several local ranks), or twice the CPUs per rank if that is more, but
    fewer if the loader starts workers without fork."""
    may_persist: bool = True
    """True if workers may stay alive between epochs. False if the Trainer reloads the loaders."""
    threads: bool = True
    """True to try worker threads, if the loader supports them."""
    given: Setting | None = None
    """The loader's own setting. It is tried too, and kept unless another is clearly faster. None: no preference."""

    def __post_init__(self) -> None:
        for name in ("demand_per_s", "budget_s", "max_trials"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SettingsError(f"{name}={value!r} is not possible. Use a number above 0.")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The possible settings of a loader."""

    cpus: float
    """CPUs for one rank."""
    most_workers: int
    kinds: tuple[Kind, ...] = ("process",)
    pin_memory: bool = False
    may_persist: bool = False
    """True if worker processes may stay alive between epochs, which saves restarting them."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Result of tuning: the setting, its reason and the trials."""

    setting: Setting
    reason: str
    """Reason for the setting, in one sentence."""
    trials: tuple[Trial, ...]
    """Trials, in the order of running."""
    rejected: tuple[tuple[Setting, str], ...] = ()
    """Settings not tried because they would break a machine limit, with the limit."""
    demand_per_s: float | None = None
    """Batches per second that the model can consume. None: unknown, so tuning found the fastest setting."""
    batch_size: int | None = None
    batches_per_s: float | None = None
    """Rate of the chosen setting."""
    starved_pct: float | None = None
    """Predicted starvation: 100 * (1 - rate / demand_per_s), 0 or more. None without a demand. The rate is
    ``batches_per_s``; without workers, where loading and training take turns, 1 / (1 / batches_per_s + 1 /
    demand_per_s)."""
    remembered: bool = False
    """True if an earlier run found the setting, and this run only checked it."""
    seconds: float = 0.0
    """Seconds of tuning in total."""

    def __repr__(self) -> str:
        return f"<Tuned: {self._line(self.setting, self.batches_per_s)}; {self.reason}>"

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook."""
        rows = [f"<tr><td>{escape(self._line(one.setting, one.batches_per_s))}</td></tr>" for one in self.trials]
        found = escape(self._line(self.setting, self.batches_per_s))
        return f"<p><b>{found}</b><br>{escape(self.reason)}</p><table>{''.join(rows)}</table>"

    def _line(self, setting: Setting, per_s: float | None) -> str:
        return f"{setting}: {'could not run' if per_s is None else throughput(per_s, self.batch_size)}"

    @property
    def settings(self) -> LoaderSettings:
        """Convert the setting to settings of a FastDataModule."""
        values = asdict(self.setting)
        if values["prefetch_factor"] is None:
            values["prefetch_factor"] = "auto"
        return LoaderSettings(**values)


class Search:
    """Proposes settings one by one, each based on the results so far.

    Attributes:
        trials: the results so far.
        rejected: settings not tried because they would break a limit, with the limit.

    Args:
        offer: the possible settings of the loader.
        goal: the demand and the limits.
        broken: describes the machine limit that a setting would break, or returns an empty string. Also takes the
            trials so far, for the sizes of batches and workers.
    """

    def __init__(self, offer: Offer, goal: Goal, broken: Callable[[Setting, Sequence[Trial]], str]) -> None:
        self.trials: list[Trial] = []
        self.rejected: dict[Setting, str] = {}
        self._offer = offer
        self._goal = goal
        self._broken = broken
        self._most: dict[Kind, int] = dict.fromkeys(offer.kinds, offer.most_workers)

    def next_setting(self) -> Setting | None:
        """Return the setting to try next. None if the search is over."""
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
        """Add the result of a trial."""
        self.trials.append(trial)
        if trial.batches_per_s is None:  # fewer workers may hit the same limit
            self._most[trial.setting.workers] = trial.setting.num_workers // 2

    def found(self) -> Tuned | None:
        """Return the best of the settings tried. None if none of them could run."""
        if all(trial.batches_per_s is None for trial in self.trials):
            return None
        best = self._given_if_fast() or self._best()
        demand = self._goal.demand_per_s
        return Tuned(
            setting=best.setting,
            reason=self._reason(best),
            trials=tuple(self.trials),
            rejected=tuple(self.rejected.items()),
            demand_per_s=demand,
            batches_per_s=best.batches_per_s,
            starved_pct=None if demand is None else max(0.0, 100 * (1 - self._effective(best) / demand)),
        )

    # --- results so far -----------------------------------------------------------------------------------------------

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
        """Return the loader's batches per second in training, ignoring the model's speed.

        Without workers the rate is lower, because loader and model take turns.
        """
        rate = trial.batches_per_s or 0.0
        demand = self._goal.demand_per_s
        if trial.setting.num_workers or not rate:
            return rate
        return TURNS * rate if demand is None else 1 / (1 / rate + 1 / demand)

    def _best(self) -> Trial:
        """Return the smallest setting that meets the demand. If none does, the smallest of the fastest."""
        ran = [trial for trial in self.trials if trial.batches_per_s is not None]
        enough = [trial for trial in ran if self._meets(trial)]
        return self._smallest(enough or ran)

    def _smallest(self, trials: list[Trial]) -> Trial:
        """Return the smallest of the equally fast settings at the top."""
        fastest = max(min(self._effective(trial), self._wanted_per_s()) for trial in trials)
        return min((trial for trial in trials if self._effective(trial) >= (1 - TIE) * fastest), key=_size)

    def _given_if_fast(self) -> Trial | None:
        """Return the trial of the user's setting. None if another is clearly faster."""
        ran = [trial for trial in self.trials if trial.batches_per_s is not None]
        fastest = max(map(self._effective, ran))
        near = (trial for trial in ran if self._effective(trial) >= (1 - KEEP) * fastest)
        return next((trial for trial in near if trial.setting == self._goal.given), None)

    @property
    def _worker_s(self) -> float:
        """Seconds per batch of a single worker, from the trial without workers."""
        probe = self.trials[0]
        return max(1 / (probe.batches_per_s or 1.0), probe.cpu_s_per_batch or 0.0)

    @property
    def _cpu_s(self) -> float:
        return self.trials[0].cpu_s_per_batch or self._worker_s

    # --- what to try next ---------------------------------------------------------------------------------------------

    def _wanted_per_s(self) -> float:
        return math.inf if self._goal.demand_per_s is None else SPARE * self._goal.demand_per_s

    def _promising_kinds(self, best: Trial) -> list[Kind]:
        """Return the kinds of workers that are untried or nearly as fast as the best, the fastest first."""
        fastest = {kind: max(map(self._effective, self._of(kind)), default=math.inf) for kind in self._offer.kinds}
        near = [kind for kind in fastest if fastest[kind] >= _CLOSE * self._effective(best)]
        return sorted(near, key=lambda kind: -fastest[kind])

    def _promising_counts(self, kind: Kind) -> list[int]:
        """Return numbers of workers to try: the best so far, with more prefetch if needed; then more or fewer."""
        ran = [trial for trial in self._of(kind) if trial.batches_per_s]
        if not ran:  # enough to meet the demand or to keep the CPUs busy, whichever is fewer
            for_cpus = _PER_CPU * self._offer.cpus * self._worker_s / self._cpu_s
            return [math.ceil(min(for_cpus, self._wanted_per_s() * self._worker_s, self._offer.most_workers))]
        best = self._smallest(ran)
        workers = best.setting.num_workers
        rate = best.batches_per_s or 0.0
        if self._meets(best):
            return [workers, min(workers, math.ceil(workers * self._wanted_per_s() / rate))]
        tried = [trial.setting.num_workers for trial in self._of(kind)]
        alone = rate * self._worker_s / workers  # share of the ideal rate, with all workers independent
        if alone < _IN_THE_WAY and workers == min(tried):
            return [workers, max(1, round(_PER_CPU * alone * workers))]
        idle = rate < _BUSY * self._offer.cpus / self._cpu_s
        if workers == max(tried) and (alone >= _IN_PROPORTION or (idle and (len(tried) > 1 or kind == "thread"))):
            more = min(2.0 * workers, 1.1 * workers * self._wanted_per_s() / rate)
            return [workers, max(workers + 1, math.ceil(more))]
        return [workers]

    def _untried(self, kind: Kind, workers: int) -> Setting | None:
        """Return the setting with this many workers, or as many as fit. None if it was tried, or if no worker fits."""
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
        """Check if this number of workers was tried with this prefetch factor or a larger one. All factors above the
        default count as equal."""
        enough = min(setting.prefetch_factor or 0, TORCH_PREFETCH + 1)
        return any(
            trial.setting.num_workers == setting.num_workers and (trial.setting.prefetch_factor or 0) >= enough
            for trial in self._of(setting.workers)
        )

    def _prefetch(self, kind: Kind, workers: int) -> int:
        """Return the prefetch factor that bridges the time of a slow batch.

        Twice a slow batch's time: the next slow batch may come before the queue is full again. Threads make a slow
        batch together.
        """
        if kind == "thread":
            return TORCH_PREFETCH
        # A model that is slower than the workers empties the queue more slowly.
        slower = 1.0 if self._goal.demand_per_s is None else self._goal.demand_per_s * self._worker_s / workers
        uneven = self._unevenness() * min(1.0, slower)
        return TORCH_PREFETCH if uneven <= _EVEN else min(MOST_PREFETCH, math.ceil(2 * uneven))

    def _unevenness(self) -> float:
        """Return a slow batch's time as a multiple of the usual time. 1 if all are alike.

        Uses 99th percentiles, not means: with batches in order, all workers wait for the worker with the slow batch.
        """
        probe = self.trials[0]
        uneven = (probe.gap_p99_s or 0.0) * (probe.batches_per_s or 0.0)
        for trial in self._of("process"):
            workers = trial.setting.num_workers
            gap_s = trial.gap_p99_s or 0.0
            # Workers in step deliver equal batches together, once per batch time. Longer gaps mean slow batches.
            if gap_s * (trial.batches_per_s or 0.0) > _EVEN * workers:
                usual_s = max(self._worker_s, workers * self._cpu_s / self._offer.cpus)
                uneven = max(uneven, gap_s / usual_s)
        return uneven

    # --- what to say --------------------------------------------------------------------------------------------------

    def _reason(self, best: Trial) -> str:
        demand = self._goal.demand_per_s
        tried = len(self.trials)
        if best.setting == self._goal.given:
            return f"none of {tried} tried is {KEEP:.0%} faster"
        if demand is not None and self._meets(best):
            if best.setting.num_workers == 0:
                load_ms = 1e3 / (best.batches_per_s or 1)
                step_ms = 1e3 / demand
                return f"loading adds only {load_ms:.3g} ms to steps of {step_ms:.3g} ms: workers could save little"
            return f"the smallest tried that keeps up with the model, with {SPARE - 1:.0%} to spare"
        gain = max(self._effective(trial) for trial in self.trials) / self._effective(best) - 1
        why = f"the fastest of {tried} tried"
        if gain > 0:
            why = f"the smallest of {tried} tried that is within {TIE:.0%} of the fastest ({gain:.1%})"
        return why if demand is None else f"{why}; with {SPARE - 1:.0%} to spare, the model could take more"


def _size(trial: Trial) -> tuple[int, int, float]:
    """Return the sort key for size: workers, then prefetched batches, then rate (faster first)."""
    return trial.setting.num_workers, trial.setting.prefetch_factor or 0, -(trial.batches_per_s or 0.0)
