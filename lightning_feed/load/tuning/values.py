"""What tuning tries, and what it finds: frozen values, None for what is not known."""

import math
from dataclasses import dataclass
from html import escape
from typing import Literal

from lightning_feed.errors import SettingsError
from lightning_feed.load.settings import LoaderSettings

Kind = Literal["process", "thread"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a trial changes of a loader."""

    num_workers: int
    prefetch_factor: int | None
    """None without workers."""
    workers: Kind = "process"
    persistent_workers: bool = False
    pin_memory: bool = False
    in_order: bool = True


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting, tried."""

    setting: Setting
    batches_per_s: float | None = None
    """Of all ranks of this machine together divided by their number; None: it could not run."""
    start_s: float | None = None
    """From ``iter(loader)`` to the first batch."""
    cpu_s_per_batch: float | None = None
    """CPU time of this process and its workers."""
    memory_bytes: int | None = None
    """Of the workers."""
    batch_bytes: int | None = None
    """Of the tensors and arrays of one batch, the largest of the first ones."""
    batch_tensors: int | None = None
    """How many of them there are in it."""
    gap_p99_s: float | None = None
    """99th percentile, over rounds of ``num_workers`` batches, of the longest time between two batches."""
    head_of_line_pct: float | None = None
    """Time for which the next batch was waited for while a later one was ready, of all time, 0 to 100; None: not
    known."""
    seconds: float = 0.0
    """That the trial took."""
    infeasible: str | None = None
    """Why it could not run."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the loader is tuned for, and what tuning may take.

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
    may_reorder: bool = False
    """Whether batches may come in another order than the sampler's (``in_order=False``)."""
    may_persist: bool = True
    """Whether workers may live on from epoch to epoch; False where the Trainer makes loaders anew."""

    def __post_init__(self) -> None:
        if self.demand_per_s is not None and not 0 < self.demand_per_s < math.inf:
            raise SettingsError(
                f"demand_per_s={self.demand_per_s!r} is not possible. Give batches per second, or None if unknown."
            )
        if not 0 < self.budget_s < math.inf:
            raise SettingsError(f"budget_s={self.budget_s!r} is not possible. Give seconds above 0.")
        for name, lowest in (("local_ranks", 1), ("max_trials", 1), ("most_workers", 0)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise SettingsError(f"{name}={value!r} is not possible. Give {lowest} or more.")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was found."""

    setting: Setting
    reason: str
    """Why this one, in one sentence."""
    trials: tuple[Trial, ...]
    """In the order in which they were run."""
    rejected: tuple[tuple[Setting, str], ...] = ()
    """Settings that would have broken a limit of the machine, and which."""
    demand_per_s: float | None = None
    """Batches per second that the model can take; None: not known, so the fastest setting was looked for."""
    batch_size: int | None = None
    batches_per_s: float | None = None
    """That the chosen setting gave."""
    starved_pct: float | None = None
    """Predicted: 100 * (1 - rate / demand_per_s), 0 or more; None without a demand. The rate is ``batches_per_s``;
    without workers, where loading and training take turns, 1 / (1 / batches_per_s + 1 / demand_per_s)."""
    options: tuple[str, ...] = ()
    """What could be gained by more than tuning does by itself, one sentence each."""
    remembered: bool = False
    """Whether it was found by an earlier run, and only checked by this one."""
    seconds: float = 0.0
    """That it took in all."""

    def __repr__(self) -> str:
        return f"<Tuned: {self._said(self.setting, self.batches_per_s)}; {self.reason}>"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        rows = [f"<tr><td>{self._said(one.setting, one.batches_per_s)}</td></tr>" for one in self.trials]
        found = escape(self._said(self.setting, self.batches_per_s))
        return f"<p><b>{found}</b><br>{escape(self.reason)}</p><table>{''.join(rows)}</table>"

    def _said(self, setting: Setting, per_s: float | None) -> str:
        unit = "samples/s" if self.batch_size else "batches/s"
        rate = "could not run" if per_s is None else f"{per_s * (self.batch_size or 1):,.0f} {unit}"
        kind = "" if setting.workers == "process" else f", workers={setting.workers!r}"
        ahead = f", prefetch_factor={setting.prefetch_factor}" if setting.prefetch_factor else ""
        return f"num_workers={setting.num_workers}{kind}{ahead}: {rate}"

    @property
    def settings(self) -> LoaderSettings:
        """As a FastDataModule takes them."""
        found = self.setting
        return LoaderSettings(
            num_workers=found.num_workers,
            prefetch_factor=found.prefetch_factor if found.prefetch_factor is not None else "auto",
            workers=found.workers,
            persistent_workers=found.persistent_workers if found.num_workers else "auto",
            pin_memory=found.pin_memory,
            in_order=found.in_order,
        )
