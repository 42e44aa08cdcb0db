"""Tuning results as text, as JSON, as code to paste; sweeps as text and as a plot."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from lightning_feed.errors import in_rate, plural, rate_unit, throughput
from lightning_feed.extras import require
from lightning_feed.measure.measurements import Place
from lightning_feed.storage.system import atomic_write
from lightning_feed.trials.search import Tuned
from lightning_feed.trials.trial import Setting, Trial

SCHEMA = "lightning_feed.tuning/1"
_BAR = 30
_MIB = 2**20


@dataclass(frozen=True)
class Paste:
    """One way to give a loader what was found."""

    where: str
    """In words: ``in your training DataLoader (Data.train_dataloader, data.py:41)``."""
    form: Literal["arguments", "settings", "override", "yaml"]
    """What ``code`` is: arguments of the call that makes the loader, those of ``LoaderSettings``, what is appended to
    the command line, or lines of a YAML file."""
    code: str


def tuned_text(tuned: Tuned, place: Place | None = None) -> str:
    """A table of the trials, what was chosen and why, what it predicts, and what to paste where.

    Args:
        tuned: what was found.
        place: where the loader is set up; None: not known.
    """
    lines = [f"workers  ahead  {rate_unit(tuned.batch_size):>11}  start  note"]
    lines += [_row(trial, tuned) for trial in tuned.trials]
    lines += [f"not run: {_short(setting)}: {why}" for setting, why in tuned.rejected]
    known = "remembered, and checked now" if tuned.remembered else plural(len(tuned.trials), "trial")
    lines += ["", f"{_short(tuned.setting)}: {tuned.reason}", f"{known}, {tuned.seconds:.0f} s"]
    if tuned.batches_per_s is not None:
        starved = "; what the model can take is not known"
        if tuned.starved_pct is not None and tuned.demand_per_s is not None:
            can_take = throughput(tuned.demand_per_s, tuned.batch_size)
            starved = f"; the model can take {can_take}, so it starves {tuned.starved_pct:.0f} %"
        lines.append(f"predicted: {throughput(tuned.batches_per_s, tuned.batch_size)}{starved}")
    for one in pastes(tuned, place):
        lines += ["", f"{one.where}:", *(f"    {line}" for line in one.code.splitlines())]
    return "\n".join(lines)


def _row(trial: Trial, tuned: Tuned) -> str:
    setting, chosen = trial.setting, tuned.setting
    head = f"{setting.num_workers:>7}  {setting.prefetch_factor or '-':>5}  "
    if trial.batches_per_s is None:
        return f"{head}{'-':>11}  {'-':>5}  could not run: {trial.infeasible}"
    start = f"{trial.start_s:.2f}" if trial.start_s is not None else "-"
    note = "threads " if setting.workers == "thread" and setting.num_workers else ""
    if _same_workers(setting, chosen) and setting.prefetch_factor == chosen.prefetch_factor:
        note += "<- chosen"
    per_s = in_rate(trial.batches_per_s * (tuned.batch_size or 1))
    return f"{head}{per_s:>11}  {start:>5}  {note}".rstrip()


def _same_workers(one: Setting, other: Setting) -> bool:
    return (one.num_workers, one.workers) == (other.num_workers, other.workers)


def _short(setting: Setting) -> str:
    ahead = f", prefetch_factor={setting.prefetch_factor}" if setting.num_workers else ""
    return f"{plural(setting.num_workers, 'thread' if setting.workers == 'thread' else 'worker')}{ahead}"


def tuned_document(tuned: Tuned, place: Place | None = None) -> dict[str, Any]:
    """For JSON, with the name of its schema. Rates are in batches per second, times in seconds."""
    rate, size = tuned.batches_per_s, tuned.batch_size
    return {
        "schema": SCHEMA,
        **asdict(tuned),
        "rejected": [{"setting": asdict(setting), "why": why} for setting, why in tuned.rejected],
        "samples_per_s": rate * size if rate is not None and size else None,
        "code": paste_line(tuned),
        "paste": [asdict(one) for one in pastes(tuned, place)],
    }


# --- what to paste ----------------------------------------------------------------------------------------------------


def pastes(tuned: Tuned, place: Place | None) -> list[Paste]:
    """What to paste, the way that fits the place first; every way where the place is not known."""
    settings = Paste("in the call that makes your FastDataModule", "settings", paste_line(tuned))
    values = _values(tuned)
    if "workers" in values:  # threads: no DataLoader has them
        return [settings]
    if not tuned.setting.num_workers:  # beside what needs workers, torch refuses 0
        values |= {"prefetch_factor": None, "persistent_workers": False}
    if place is None:
        return [Paste("in the call that makes your training DataLoader", "arguments", _arguments(values)), settings]
    if place.form == "settings":
        return [Paste(f"in {place.words}", "settings", paste_line(tuned))]
    found, keys = [], dict(place.overrides)
    given = {name: value for name, value in values.items() if name in keys}
    if given:
        line = " ".join(f"{keys[name]}={json.dumps(value)}" for name, value in given.items())
        found.append(Paste("on the command line", "override", line))
        above = keys["num_workers"].removeprefix("--").rpartition(".")[0]
        yaml = "\n".join(f"{keys[name].rpartition('.')[2]}: {json.dumps(value)}" for name, value in given.items())
        found.append(Paste(f"or in YAML, under {above}" if above else "or in YAML", "yaml", yaml))
    names = dict(place.names)
    rest = {
        names.get(name, name): value
        for name, value in values.items()
        if name not in given and (not names or name in names)
    }
    if rest:
        found.append(Paste(f"{'and ' if given else ''}in {place.words}", "arguments", _arguments(rest)))
    return found


def paste_line(tuned: Tuned) -> str:
    """The line of code that gives a FastDataModule these settings."""
    return f"loader=LoaderSettings({_arguments(_values(tuned))})"


def _values(tuned: Tuned) -> dict[str, Any]:
    found = tuned.setting
    values: dict[str, Any] = {"num_workers": found.num_workers}
    if found.num_workers:
        if found.workers != "process":
            values["workers"] = found.workers
        values |= {"prefetch_factor": found.prefetch_factor, "persistent_workers": found.persistent_workers}
    return {**values, "pin_memory": found.pin_memory}


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


# --- sweeps -----------------------------------------------------------------------------------------------------------


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
        top = max((self.rate(trial) or 0.0 for trial in self.trials), default=0.0)
        lines = [f"workers {rate_unit(self.batch_size):>11}    CPU   memory"]
        lines += [self._line(trial, top) + ("  <- tuned" if self._is_chosen(trial) else "") for trial in self.trials]
        if self.chosen is not None and not any(map(self._is_chosen, self.trials)):
            lines.append(f"tuned: {self.chosen}, which is not on this grid")
        if self.demand_per_s is not None:
            lines.append(f"the model can take {throughput(self.demand_per_s, self.batch_size)}")
        return "\n".join(lines)

    def _is_chosen(self, trial: Trial) -> bool:
        return self.chosen is not None and _same_workers(self.chosen, trial.setting)

    def _line(self, trial: Trial, top: float) -> str:
        workers, rate = trial.setting.num_workers, self.rate(trial)
        if rate is None:
            return f"{workers:>7} {'-':>11}  {trial.infeasible or 'it could not run'}"
        cpu, memory = self.cpu_pct(trial), trial.memory_bytes
        cpu_text = f"{cpu:.0f} %" if cpu is not None else "-"
        memory_text = f"{memory / _MIB:,.0f}M" if memory is not None else "-"
        bar = "#" * max(1, round(_BAR * rate / top)) if top else ""
        return f"{workers:>7} {in_rate(rate):>11} {cpu_text:>6} {memory_text:>8}  {bar:<{_BAR}}".rstrip()


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
    rows: list[tuple[str, Callable[[Trial], float | None]]] = [
        (rate_unit(found.batch_size), found.rate),
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
        axes[0].axhline(
            found.demand_per_s * (found.batch_size or 1),
            color="tab:red",
            linestyle="--",
            label="what the model can take",
        )
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend()
    axes[-1].set_xlabel("num_workers")
    drawn = BytesIO()
    canvas.savefig(drawn, format="png")
    with atomic_write(path) as file:
        file.write(drawn.getvalue())
    return path
