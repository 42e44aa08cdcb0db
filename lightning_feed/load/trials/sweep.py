"""A sweep: a whole grid of worker counts tried one after the other, as a value, as text, and as a plot."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lightning_feed.archive.files import atomic_write
from lightning_feed.errors import SettingsError
from lightning_feed.extras import require
from lightning_feed.load.machine import read_machine
from lightning_feed.load.recommend import TORCH_PREFETCH
from lightning_feed.load.settings import MOST
from lightning_feed.load.throughput import RoundLimits
from lightning_feed.load.trials.trial import Feasible, Setting, Trial, free_files, run_trial

DEFAULT_GRID = tuple(range(0, 51, 5))
"""Numbers of workers: 0, 5, 10 ... 50."""
_BAR = 30
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The rates of a loader with each number of workers of a grid."""

    trials: tuple[Trial, ...]
    """By the number of workers. What could not run, or would have broken a limit, is among them and says why."""
    cpus: float
    """That one rank can use."""
    batch_size: int | None = None
    """None: rates are of batches."""
    chosen: Setting | None = None
    """The tuner's choice; its number of workers need not be on the grid."""
    demand_per_s: float | None = None
    """Batches per second that the model can take; None: not known."""
    seconds: float = 0.0
    """That it took in all."""

    def rate(self, trial: Trial) -> float | None:
        """Samples per second of a trial; batches where the batch size is not known; None where it could not run."""
        return None if trial.batches_per_s is None else trial.batches_per_s * (self.batch_size or 1)

    def cpu_pct(self, trial: Trial) -> float | None:
        """Share of the CPUs that a trial kept busy, 0 to 100."""
        if trial.batches_per_s is None or trial.cpu_s_per_batch is None:
            return None
        return 100 * trial.batches_per_s * trial.cpu_s_per_batch / self.cpus

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {**asdict(trial), "cpu_pct": self.cpu_pct(trial), "tuned": self._is_chosen(trial)} for trial in self.trials
        ]
        return {**asdict(self), "trials": rows}

    def text(self) -> str:
        """A table with a bar for each rate, in plain characters."""
        unit = "samples/s" if self.batch_size else "batches/s"
        top = max((self.rate(trial) or 0.0 for trial in self.trials), default=0.0)
        lines = [f"workers {unit:>11}    CPU   memory"]
        lines += [self._line(trial, top) + ("  <- tuned" if self._is_chosen(trial) else "") for trial in self.trials]
        if self.chosen is not None and not any(map(self._is_chosen, self.trials)):
            lines.append(f"tuned: {self.chosen}, which is not on this grid")
        if self.demand_per_s is not None:
            lines.append(f"the model can take {self.demand_per_s * (self.batch_size or 1):,.0f} {unit}")
        return "\n".join(lines)

    def _is_chosen(self, trial: Trial) -> bool:
        chosen, tried = self.chosen, trial.setting
        return chosen is not None and (chosen.num_workers, chosen.workers) == (tried.num_workers, tried.workers)

    def _line(self, trial: Trial, top: float) -> str:
        workers, rate = trial.setting.num_workers, self.rate(trial)
        if rate is None:
            return f"{workers:>7} {'-':>11}  {trial.infeasible or 'it could not run'}"
        cpu, memory = self.cpu_pct(trial), trial.memory_bytes
        cpu_text = f"{cpu:.0f} %" if cpu is not None else "-"
        memory_text = f"{memory / _MIB:,.0f}M" if memory is not None else "-"
        bar = "#" * max(1, round(_BAR * rate / top)) if top else ""
        return f"{workers:>7} {rate:>11,.0f} {cpu_text:>6} {memory_text:>8}  {bar:<{_BAR}}".rstrip()


def sweep_loader(
    loader: DataLoader[Any],
    *,
    grid: Iterable[int] = DEFAULT_GRID,
    limits: RoundLimits | None = None,
    on_trial: Callable[[], object] = lambda: None,
) -> Sweep:
    """Try a loader with each number of workers of a grid, all else as it is. It is left as before.

    Args:
        loader: any DataLoader.
        grid: numbers of workers, in any order. What would break a limit of this machine is not run.
        limits: how long each is measured.
        on_trial: called after each trial.

    Raises:
        SettingsError: for a grid that is empty or holds what is no number of workers.
        DatasetError: the data set raised.
        LoaderError: the loader is empty, or hangs without workers.

    Returns:
        The trials by the number of workers, without ``chosen`` and ``demand_per_s``.
    """
    counts, machine, context = check_grid(grid), read_machine(), loader.multiprocessing_context
    limited = Feasible(
        machine=machine,
        free_files=free_files(),
        background=getattr(loader, "background", 0),
        start_method=context.get_start_method() if context is not None else None,
    )
    trials: list[Trial] = []
    began = time.perf_counter()
    for workers in counts:
        setting = _setting(loader, workers)
        why = limited.broken(setting, trials)
        trials.append(
            Trial(setting=setting, infeasible=why) if why else run_trial(loader, setting, limits or RoundLimits())
        )
        on_trial()
    return Sweep(
        trials=tuple(trials),
        cpus=machine.usable_cpus,
        batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        seconds=time.perf_counter() - began,
    )


def _setting(loader: DataLoader[Any], workers: int) -> Setting:
    if not workers:
        return Setting(num_workers=0, prefetch_factor=None, pin_memory=loader.pin_memory)
    return Setting(
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor or TORCH_PREFETCH,
        workers=getattr(loader, "workers", "process"),
        pin_memory=loader.pin_memory,
        in_order=loader.in_order or workers < 2,  # one worker has nobody to overtake it
    )


def check_grid(grid: Iterable[int]) -> tuple[int, ...]:
    """The numbers of a grid in their order, each once.

    Raises:
        SettingsError: for a grid that is empty or holds what is no number of workers.
    """
    counts = tuple(grid)
    wrong = [one for one in counts if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MOST]
    if wrong or not counts:
        what = f"{wrong[0]!r} is no number of workers" if wrong else "it is empty"
        raise SettingsError(f"The grid {list(counts)!r} cannot be tried: {what}. Give whole numbers from 0 to {MOST}.")
    return tuple(sorted(set(counts)))


def write_plot(found: Sweep, path: Path) -> Path:
    """Draw samples per second, CPU share and memory against the number of workers, into a PNG file.

    The file is there whole or not at all. Matplotlib's global state, its backend included, is not touched.

    Raises:
        MissingExtraError: without matplotlib.
        OSError: when the file cannot be written.
    """
    figure = require("matplotlib.figure", extra="plot", why="the plot of a sweep").Figure
    canvas = figure(figsize=(7, 8), layout="constrained")
    axes: Any = canvas.subplots(3, sharex=True)
    unit = "samples/s" if found.batch_size else "batches/s"
    rows: list[tuple[str, Callable[[Trial], float | None]]] = [
        (unit, found.rate),
        ("CPU share in %", found.cpu_pct),
        ("memory of the workers in MiB", lambda one: None if one.memory_bytes is None else one.memory_bytes / _MIB),
    ]
    for axis, (label, value_of) in zip(axes, rows, strict=True):
        points = [(one.setting.num_workers, value) for one in found.trials if (value := value_of(one)) is not None]
        axis.plot([workers for workers, _ in points], [value for _, value in points], marker="o")
        for one in found.trials:
            if one.infeasible:
                axis.axvline(one.setting.num_workers, color="0.8", linestyle=":")
        if found.chosen is not None:
            axis.axvline(found.chosen.num_workers, color="tab:green", label=f"tuned: {found.chosen}")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    if found.demand_per_s is not None:
        needed = found.demand_per_s * (found.batch_size or 1)
        axes[0].axhline(needed, color="tab:red", linestyle="--", label="what the model can take")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend()
    axes[-1].set_xlabel("num_workers")
    drawn = BytesIO()
    canvas.savefig(drawn, format="png")
    with atomic_write(path) as file:
        file.write(drawn.getvalue())
    return path
