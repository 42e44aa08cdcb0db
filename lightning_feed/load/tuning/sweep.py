"""A whole grid of workers tried one after the other: as a value, as text, and as a picture."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lightning_feed.archive.whole_file import whole_file
from lightning_feed.errors import SettingsError
from lightning_feed.extras import require
from lightning_feed.load.machine import read_machine
from lightning_feed.load.recommend import TORCH_PREFETCH
from lightning_feed.load.rounds import RoundLimits
from lightning_feed.load.settings import MOST
from lightning_feed.load.tuning.feasible import Feasible, read_open_files
from lightning_feed.load.tuning.trials import run_trial
from lightning_feed.load.tuning.values import Setting, Trial

DEFAULT_GRID = tuple(range(0, 51, 5))
"""Numbers of workers: 0, 5, 10 ... 50."""
_BAR = 30
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a loader gives with each number of workers of a grid."""

    trials: tuple[Trial, ...]
    """By the number of workers. What could not run, or would have broken a limit, is among them and says why."""
    cpus: float
    """That one rank can use."""
    batch_size: int | None = None
    """None: rates are of batches."""
    chosen: Setting | None = None
    """What tuning takes; its number of workers need not be on the grid."""
    demand_per_s: float | None = None
    """Batches per second that the model can take; None: not known."""
    seconds: float = 0.0
    """That it took in all."""

    @property
    def best(self) -> Trial | None:
        """The fastest; None when none could run."""
        ran = [trial for trial in self.trials if trial.batches_per_s is not None]
        return max(ran, key=lambda trial: trial.batches_per_s or 0.0, default=None)

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
        return {**asdict(self), "trials": [self._row(trial) for trial in self.trials]}

    def text(self) -> str:
        """A table with a bar for each rate, in plain characters."""
        unit = "samples/s" if self.batch_size else "batches/s"
        top = max((self.rate(trial) or 0.0 for trial in self.trials), default=0.0)
        lines = [f"workers {unit:>11}    CPU   memory"]
        marked = False
        for trial in self.trials:
            mark = self._is_chosen(trial)
            marked |= mark
            lines.append(self._line(trial, top) + ("  <- tuned" if mark else ""))
        if self.chosen is not None and not marked:
            lines.append(f"tuned: {_named(self.chosen)}, which is not on this grid")
        if self.demand_per_s is not None:
            lines.append(f"the model can take {self.demand_per_s * (self.batch_size or 1):,.0f} {unit}")
        return "\n".join(lines)

    def _row(self, trial: Trial) -> dict[str, Any]:
        return {**asdict(trial), "cpu_pct": self.cpu_pct(trial), "tuned": self._is_chosen(trial)}

    def _is_chosen(self, trial: Trial) -> bool:
        chosen, setting = self.chosen, trial.setting
        same = ("num_workers", "workers")
        return chosen is not None and all(getattr(chosen, name) == getattr(setting, name) for name in same)

    def _line(self, trial: Trial, top: float) -> str:
        workers, rate = trial.setting.num_workers, self.rate(trial)
        if rate is None:
            return f"{workers:>7} {'-':>11}  {trial.infeasible or 'it could not run'}"
        cpu, memory = self.cpu_pct(trial), trial.memory_bytes
        cpu_text = f"{cpu:.0f} %" if cpu is not None else "-"
        memory_text = f"{memory / _MIB:,.0f}M" if memory is not None else "-"
        bar = "#" * max(1, round(_BAR * rate / top)) if top else ""
        return f"{workers:>7} {rate:>11,.0f} {cpu_text:>6} {memory_text:>8}  {bar:<{_BAR}}".rstrip()


def sweep(
    try_setting: Callable[[Setting], Trial],
    *,
    cpus: float,
    grid: Iterable[int] = DEFAULT_GRID,
    like: Setting | None = None,
    broken: Callable[[Setting, Sequence[Trial]], str] | None = None,
    told: Callable[[int, int], object] | None = None,
) -> Sweep:
    """Try each number of workers of a grid.

    Args:
        try_setting: runs a trial, and tells of what cannot run instead of raising.
        cpus: that one rank can use.
        grid: numbers of workers, in any order.
        like: all else of the settings; None: torch's defaults.
        broken: the limit of the machine that a setting would break, given the trials so far, as a sentence; empty for
            none. Such settings are not run. None: there are no limits.
        told: called after each trial with how many are done, and of how many.

    Raises:
        SettingsError: for a grid that is empty or holds what is no number of workers.

    Returns:
        The trials by the number of workers. ``chosen`` and ``demand_per_s`` are left to :func:`dataclasses.replace`.
    """
    counts = check_grid(grid)
    like = like or Setting(num_workers=1, prefetch_factor=TORCH_PREFETCH)
    trials: list[Trial] = []
    began = time.perf_counter()
    for workers in counts:
        setting = _with_workers(like, workers)
        why = broken(setting, trials) if broken is not None else ""
        trials.append(Trial(setting=setting, infeasible=why) if why else try_setting(setting))
        if told is not None:
            told(len(trials), len(counts))
    return Sweep(trials=tuple(trials), cpus=cpus, seconds=time.perf_counter() - began)


def sweep_loader(
    loader: DataLoader[Any],
    *,
    grid: Iterable[int] = DEFAULT_GRID,
    limits: RoundLimits | None = None,
    local_ranks: int = 1,
    told: Callable[[int, int], object] | None = None,
) -> Sweep:
    """Try a loader with each number of workers of a grid, all else as it is. It is as before afterwards.

    Args:
        loader: any DataLoader.
        grid: numbers of workers. What would break a limit of this machine is not run.
        limits: how long each is measured.
        local_ranks: training processes of this machine, for each of which a loader runs.
        told: called after each trial with how many are done, and of how many.

    Raises:
        SettingsError: for a grid that is empty or holds what is no number of workers.
        DatasetError: the data set raised.
        LoaderError: the loader is empty, or hangs without workers.
    """
    machine = read_machine()
    context = loader.multiprocessing_context
    limited = Feasible(
        machine=machine,
        files=read_open_files(),
        local_ranks=local_ranks,
        background=getattr(loader, "background", 0),
        start_method=context.get_start_method() if context is not None else None,
    )
    like = Setting(
        num_workers=max(1, loader.num_workers),
        prefetch_factor=loader.prefetch_factor or TORCH_PREFETCH,
        workers=getattr(loader, "workers", "process"),
        pin_memory=loader.pin_memory,
        in_order=loader.in_order,
    )
    found = sweep(
        lambda setting: run_trial(loader, setting, limits or RoundLimits(), copies=local_ranks),
        cpus=machine.usable_cpus / local_ranks,
        grid=grid,
        like=like,
        broken=limited.broken,
        told=told,
    )
    return replace(found, batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None))


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
    figure = require("matplotlib.figure", extra="plot", why="the picture of a sweep").Figure
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
            axis.axvline(found.chosen.num_workers, color="tab:green", label=f"tuned: {_named(found.chosen)}")
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
    return _write(path, drawn.getvalue())


def _with_workers(like: Setting, workers: int) -> Setting:
    if not workers:
        return Setting(num_workers=0, prefetch_factor=None, pin_memory=like.pin_memory)
    return Setting(
        num_workers=workers,
        prefetch_factor=like.prefetch_factor or TORCH_PREFETCH,
        workers=like.workers,
        persistent_workers=like.persistent_workers,
        pin_memory=like.pin_memory,
        in_order=like.in_order or workers < 2,
    )


def _named(setting: Setting) -> str:
    kind = " threads" if setting.workers == "thread" else ""
    ahead = f", prefetch_factor={setting.prefetch_factor}" if setting.prefetch_factor is not None else ""
    return f"num_workers={setting.num_workers}{kind}{ahead}"


def _write(path: Path, content: bytes) -> Path:
    with whole_file(path) as file:
        file.write(content)
    return path
