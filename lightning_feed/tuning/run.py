"""``tune`` and its command: find loader settings by a few trials, without side effects."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from lightning_feed._host import AnyModule, AnyTrainer
from lightning_feed.diagnosing.batches import own_loaders
from lightning_feed.diagnosing.failures import user_errors
from lightning_feed.diagnosing.program import Fit
from lightning_feed.diagnosing.session import parts_of
from lightning_feed.diagnosing.short_fits import DiagnosisSession, Limits, open_session, quiet
from lightning_feed.errors import LoaderError, SettingsError, in_rate, plural, rate_unit, throughput
from lightning_feed.extras import require
from lightning_feed.load.kinds import Batch
from lightning_feed.load.machine import read_machine
from lightning_feed.load.processes import end_pass
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import MOST, TORCH_PREFETCH
from lightning_feed.measure.measurements import Place
from lightning_feed.storage.system import atomic_write
from lightning_feed.trials.cloning import Changes, RoundLimits, clone_loader, has_threads
from lightning_feed.trials.search import Goal, Tuned
from lightning_feed.trials.trial import Setting, Trial, feasible, run_trial
from lightning_feed.trials.tune_loader import Store, tune_loader

REPLAY_STEPS = 300
FEWEST_STEPS = 12
REPLAY_S = 5.0

# --- results as text, JSON, code to paste, and a plot ----------------------------------------------------------------

SCHEMA = "lightning_feed.tuning/1"
_BAR = 30
_MIB = 2**20


@dataclass(frozen=True)
class Paste:
    """One way to apply the found settings to a loader."""

    where: str
    """Description of the place, such as ``in your training DataLoader (Data.train_dataloader, data.py:41)``."""
    form: Literal["arguments", "settings", "override", "yaml", "callback"]
    """Kind of ``code``: arguments of the call that makes the loader, arguments of ``LoaderSettings``, command line
    options, lines of a YAML file, or a Trainer callback, if a package makes the loader and takes no settings."""
    code: str


def tuned_text(tuned: Tuned, place: Place | None = None) -> str:
    """Format the result as text: a table of the trials, the choice with its reason and prediction, and code to paste.

    Args:
        tuned: result of tuning.
        place: the code that sets up the loader. None: unknown.
    """
    lines = [f"workers  ahead  {rate_unit(tuned.batch_size):>11}  start  note"]
    lines += [_row(trial, tuned) for trial in tuned.trials]
    lines += [f"not run: {_short(setting)}: {why}" for setting, why in tuned.rejected]
    known = "remembered, and checked now" if tuned.remembered else plural(len(tuned.trials), "trial")
    lines += ["", f"{_short(tuned.setting)}: {tuned.reason}", f"{known}, {tuned.seconds:.0f} s"]
    if tuned.batches_per_s is not None:
        starved = "; the model's rate is unknown"
        if tuned.starved_pct is not None and tuned.demand_per_s is not None:
            can_take = throughput(tuned.demand_per_s, tuned.batch_size)
            starved = f"; the model can take {can_take}, so it starves {tuned.starved_pct:.0f} %"
        lines.append(f"predicted: {throughput(tuned.batches_per_s, tuned.batch_size)}{starved}")
    for one in pastes(tuned, place):
        lines += ["", f"{one.where}:", *(f"    {line}" for line in one.code.splitlines())]
    return "\n".join(lines)


def _row(trial: Trial, tuned: Tuned) -> str:
    setting = trial.setting
    chosen = tuned.setting
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
    """Convert the result for JSON, with a schema name. Rates are in batches per second, times in seconds."""
    rate = tuned.batches_per_s
    size = tuned.batch_size
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
    """Return code to paste, in the forms that fit the place, the best form first.

    If the place is unknown, one form for a DataLoader and one for a FastDataModule.
    """
    settings = Paste("in the call that makes your FastDataModule", "settings", paste_line(tuned))
    values = _values(tuned)
    if "workers" in values:  # threads: a DataLoader cannot use them
        return [settings]
    if not tuned.setting.num_workers:  # torch refuses 0 workers with options that need workers
        values |= {"prefetch_factor": None, "persistent_workers": False}
    if place is None:
        return [Paste("in the call that makes your training DataLoader", "arguments", _arguments(values)), settings]
    if place.form == "settings":
        return [Paste(f"in {place.words}", "settings", paste_line(tuned))]
    if place.form == "callback":
        return [Paste(f"in callbacks=[...] of the Trainer: {place.words}", "callback", "AutotuneCallback()")]
    keys = dict(place.overrides)
    found = _overrides(keys, {name: value for name, value in values.items() if name in keys})
    rest = {name: value for name, value in values.items() if name not in keys}
    if rest:
        found.append(Paste(f"{'and ' if found else ''}in {place.words}", "arguments", _arguments(rest)))
    return found


def _overrides(keys: dict[str, str], values: dict[str, Any]) -> list[Paste]:
    """Format values for their keys on the command line, or in YAML."""
    if not values:
        return []
    line = " ".join(f"{keys[name]}={json.dumps(value)}" for name, value in values.items())
    above = keys["num_workers"].removeprefix("--").rpartition(".")[0]
    yaml = "\n".join(f"{keys[name].rpartition('.')[2]}: {json.dumps(value)}" for name, value in values.items())
    where = f"or in YAML, under {above}" if above else "or in YAML"
    return [Paste("on the command line", "override", line), Paste(where, "yaml", yaml)]


def paste_line(tuned: Tuned) -> str:
    """Return the line of code that applies the tuned setting to a FastDataModule."""
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
    """A loader's rates for each number of workers in a grid."""

    trials: tuple[Trial, ...]
    """Trials by number of workers. Includes trials that could not run or would break a limit, with the reason."""
    cpus: float
    """Number of CPUs that one rank can use."""
    batch_size: int | None = None
    """Samples per batch. None: rates are in batches."""
    chosen: Setting | None = None
    """The tuner's choice, which may be outside the grid."""
    demand_per_s: float | None = None
    """Batches per second that the model can consume. None: unknown."""
    seconds: float = 0.0
    """Seconds that the sweep took."""

    def rate(self, trial: Trial) -> float | None:
        """Return a trial's samples per second, or batches per second if the batch size is unknown. None if the trial
        could not run."""
        return None if trial.batches_per_s is None else trial.batches_per_s * (self.batch_size or 1)

    def cpu_pct(self, trial: Trial) -> float | None:
        """Return the share of CPUs that a trial kept busy, 0 to 100."""
        if trial.batches_per_s is None or trial.cpu_s_per_batch is None:
            return None
        return 100 * trial.batches_per_s * trial.cpu_s_per_batch / self.cpus

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for JSON."""
        rows = [
            {**asdict(trial), "cpu_pct": self.cpu_pct(trial), "tuned": self._is_chosen(trial)} for trial in self.trials
        ]
        return {**asdict(self), "trials": rows}

    def text(self) -> str:
        """Format as a table with a bar for each rate, in plain characters."""
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
        workers = trial.setting.num_workers
        rate = self.rate(trial)
        if rate is None:
            return f"{workers:>7} {'-':>11}  {trial.infeasible or 'it could not run'}"
        cpu = self.cpu_pct(trial)
        memory = trial.memory_bytes
        cpu_text = f"{cpu:.0f} %" if cpu is not None else "-"
        memory_text = f"{memory / _MIB:,.0f}M" if memory is not None else "-"
        bar = "#" * max(1, round(_BAR * rate / top)) if top else ""
        return f"{workers:>7} {in_rate(rate):>11} {cpu_text:>6} {memory_text:>8}  {bar:<{_BAR}}".rstrip()


def write_plot(found: Sweep, path: Path) -> Path:
    """Plot samples per second, CPU share and memory against the number of workers, as a PNG file.

    The file is written atomically. Matplotlib's global state, including its backend, is not touched.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = require("matplotlib.figure", extra="plot", why="the plot of a sweep").Figure
    canvas = figure(figsize=(7, 8), layout="constrained")
    axes: Any = canvas.subplots(3, sharex=True)
    rows: dict[str, Callable[[Trial], float | None]] = {
        rate_unit(found.batch_size): found.rate,
        "CPU share in %": found.cpu_pct,
        "memory of the workers in MiB": lambda one: None if one.memory_bytes is None else one.memory_bytes / _MIB,
    }
    for axis, (label, value_of) in zip(axes, rows.items(), strict=True):
        # matplotlib draws no point where a value is None
        axis.plot([one.setting.num_workers for one in found.trials], [*map(value_of, found.trials)], marker="o")
        for workers in (one.setting.num_workers for one in found.trials if one.infeasible):
            axis.axvline(workers, color="0.8", linestyle=":")
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


# --- tune ------------------------------------------------------------------------------------------------------------


def tune(  # noqa: PLR0913  # all but the target are by name, and have a default
    target: Any,
    *,
    model: AnyModule = None,
    trainer: AnyTrainer = None,
    batch_size: int | None = None,
    demand_per_s: float | None = None,
    budget_s: float = 30.0,
    max_trials: int = 5,
    fresh: bool = False,
    loader: str | None = None,
) -> Tuned:
    """Find loader settings for a data module or a DataLoader, without changing either.

    With a model or ``demand_per_s``, picks the smallest setting that delivers 10 % more than the model can consume.
    Otherwise picks the fastest. The result is stored per machine, data set, batch size and package versions, and
    checked with one short trial next time.

    Args:
        target: a LightningDataModule, which is prepared and set up for "fit", or torch DataLoaders.
        model: the LightningModule. Its training rate is measured on one batch for some seconds.
        trainer: the Trainer for the settings of the run. Loaders for all its local ranks are tried at once.
        batch_size: samples in a batch, for rates in samples per second, if the loader has no ``batch_size``.
        demand_per_s: batches per second that the model can train, instead of measuring it.
        budget_s: seconds for the trials. No trial starts later.
        max_trials: largest number of trials, including the first one, without workers.
        fresh: ignore remembered results.
        loader: key or number of the loader to tune, if there are several, such as ``"cls"``.

    Raises:
        SettingsError: the target cannot be tuned, or the values leave nothing to try.
        DatasetError: the data set raises; the message names the sample.
        LoaderError: the loader is empty, or hangs.

    Returns:
        The setting, its reason, the trials and the prediction. ``Tuned.settings`` fits a FastDataModule.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from lightning_feed import tune
        >>> loader = DataLoader(range(10_000), batch_size=100)
        >>> tune(loader, demand_per_s=1, budget_s=1, fresh=True).setting.num_workers
        0
    """
    goal = Goal(demand_per_s=demand_per_s, budget_s=budget_s, max_trials=max_trials)
    with open_target_session(target, model, trainer, loader) as (session, one):
        ranks = 1 if trainer is None else trainer.num_devices
        return find(session, one, replace(goal, local_ranks=ranks), batch_size=batch_size, fresh=fresh)


def find(
    session: DiagnosisSession, loader: DataLoader[Batch], goal: Goal, *, batch_size: int | None, fresh: bool
) -> Tuned:
    """Find the settings for a loader, with a progress bar on stderr.

    Args:
        session: training session. Its module's demand is measured unless the goal has one.
        loader: the training loader.
        goal: target and limits. Device and persistent workers follow from the Trainer.
        batch_size: as for :func:`tune`.
        fresh: as for :func:`tune`.
    """
    device = session.trainer.strategy.root_device
    reloads = session.trainer.reload_dataloaders_every_n_epochs
    goal = replace(goal, device_type=device.type, may_persist=not reloads)
    with tqdm(total=goal.max_trials, desc="tune", disable=None, leave=False) as bar:
        if session.model is not None and goal.demand_per_s is None:
            bar.set_description_str("tune: what the model can take")
            goal = replace(goal, demand_per_s=measure_demand(session))
            bar.set_description_str("tune")
        tuned = tune_loader(loader, goal, store=Store(), fresh=fresh, on_trial=lambda _: bar.update())
    return replace(tuned, batch_size=tuned.batch_size or batch_size or batch_size_of(loader))


def batch_size_of(loader: DataLoader[Batch]) -> int | None:
    """Return the samples per batch. None if unknown."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


# --- the command ------------------------------------------------------------------------------------------------------


def run_tune(  # the options of the command, by name
    fit: Fit,
    goal: Goal,
    *,
    samples_per_s: float | None = None,
    fresh: bool = False,
    grid: Sequence[int] | None = None,
    loader: str | None = None,
) -> tuple[Tuned, Sweep | None, Place | None]:
    """Tune, and sweep if requested. The sweep marks the tuner's choice. Also returns the loader's place, if known.

    Args:
        fit: the module and the data.
        goal: the budget.
        samples_per_s: rate that the model can consume. None: measured, if there is a module.
        fresh: as for :func:`tune`.
        grid: numbers of workers to sweep; None: no sweep.
        loader: key or number of the loader, if there are several.

    Raises:
        FeedError: as for ``tune``, or the demand is in samples and the batch size is unknown.
    """
    wrong = [workers for workers in grid or () if not 0 <= workers <= MOST]
    if wrong:  # before seconds are spent on trials
        raise SettingsError(f"--sweep: {wrong[0]} is not a number of workers. Use whole numbers from 0 to {MOST}.")
    data = next((one for one in (fit.datamodule, fit.train_dataloaders) if one is not None), fit.model)
    with open_target_session(data, fit.model, fit.trainer, loader) as (session, one):
        size = batch_size_of(one)
        if samples_per_s is not None:
            if size is None:
                raise SettingsError(
                    f"--demand {samples_per_s:g} is in samples per second, but the loader's batch size is unknown. "
                    "Leave it out, or call tune(demand_per_s=...), in batches per second."
                )
            goal = replace(goal, demand_per_s=samples_per_s / size)
        tuned = find(session, one, goal, batch_size=size, fresh=fresh)
        place = session.place()
        if grid is None:
            return tuned, None, place
        with tqdm(total=len(grid), desc="sweep", disable=None, leave=False) as bar:
            swept = sweep_loader(one, grid, bar.update)
    return tuned, replace(swept, chosen=tuned.setting, demand_per_s=tuned.demand_per_s), place


def sweep_loader(loader: DataLoader[Batch], grid: Iterable[int], on_trial: Callable[[], object]) -> Sweep:
    """Try a loader with each number of workers in a grid. Leaves the loader unchanged.

    Args:
        loader: any DataLoader.
        grid: numbers of workers, in any order. Any that would break a limit of this machine is listed, but not tried.
        on_trial: called after each trial.

    Raises:
        DatasetError: the data set raised an error.
        LoaderError: the loader is empty, or hangs without workers.

    Returns:
        A Sweep with the trials ordered by number of workers, and without ``chosen`` and ``demand_per_s``.
    """
    machine = read_machine()
    began = time.perf_counter()
    limits = feasible(loader, machine)
    trials = list[Trial]()
    for workers in sorted(set(grid)):
        setting = Setting(
            num_workers=workers,
            prefetch_factor=(loader.prefetch_factor or TORCH_PREFETCH) if workers else None,
            workers="thread" if workers and has_threads(loader) else "process",
            pin_memory=loader.pin_memory,
            in_order=loader.in_order or workers < 2,  # with one worker, no batch can overtake another
        )
        why = limits.broken(setting, trials)
        trials.append(Trial(setting=setting, infeasible=why) if why else run_trial(loader, setting, RoundLimits()))
        on_trial()
    seconds = time.perf_counter() - began
    return Sweep(trials=tuple(trials), cpus=machine.usable_cpus, batch_size=batch_size_of(loader), seconds=seconds)


# --- the loader to tune, and its model's demand -----------------------------------------------------------------------


@contextmanager
def open_target_session(
    target: object, model: object, trainer: object, name: str | None = None
) -> Iterator[tuple[DiagnosisSession, DataLoader[Batch]]]:
    """Open a target's training loader for training. On exit, everything is restored.

    Args:
        target: a data module, which is prepared and set up; loaders; or ``model``, if it has ``train_dataloader``.
        model: the module, or None.
        trainer: the user's Trainer. None: a new one, on Lightning's choice of device.
        name: key of the loader among several, as in messages.

    Raises:
        SettingsError: the target is of another kind, has several training loaders or no DataLoader, or the Trainer
            cannot be used.
        FeedError: the set-up of the data module fails.
    """
    datamodule, loaders = (target, None) if hasattr(target, "train_dataloader") else (None, target)
    session = open_session(trainer, model, None if target is model else datamodule, loaders)
    with quiet(), session.restoring():
        with user_errors("the data module could not be set up"):
            session.set_up()
        yield session, _named_loader(session, name)


def measure_demand(session: DiagnosisSession) -> float:
    """Measure batches per second of a fit that repeats one batch, including its transfer to the device.

    The batch is loaded before, and kept on the host. With PrefetchCallback its copy to the device overlaps with
    computing; without, the copy is part of the model's time.

    Raises:
        FeedError: the fit fails, or is too slow to be measured.
    """
    with user_errors("a batch could not be loaded"), preserve_state(session.train_loaders):
        batch = _first_batch(session)
    if batch is None:
        raise LoaderError("The training loader yields no batch. Check the length of the data set, and drop_last.")
    accumulate = session.trainer.accumulate_grad_batches
    limits = Limits(least=FEWEST_STEPS * accumulate, most=REPLAY_STEPS * accumulate, seconds=REPLAY_S)
    with user_errors("training on one batch again and again failed"):
        per_s = session.replay([batch], limits, on_device=False)
    if per_s is None:
        raise LoaderError(
            "Training repeatedly on one batch was too slow to measure the model's rate. Set demand_per_s=..., in "
            "batches per second, or leave the model out to look for the fastest setting."
        )
    return per_s


def _first_batch(session: DiagnosisSession) -> Any:
    """Load the loop's first batch in this process; one batch of each loader, if several. None if there is no batch."""
    mine = own_loaders(session.train_loaders, lambda loader: clone_loader(loader, Changes(num_workers=0)))
    if isinstance(mine, DataLoader):
        batches = iter(mine)
        try:
            return next(batches, None)
        finally:
            end_pass(batches)
    combined = session.package.utilities.CombinedLoader
    whole = mine if isinstance(mine, combined) else combined(mine, "max_size_cycle")  # as a fit would
    batch, _, _ = next(iter(whole), (None, 0, 0))
    return batch


def _named_loader(session: DiagnosisSession, name: str | None) -> DataLoader[Batch]:
    try:
        parts = {part.name: part.loader for part in parts_of(session.train_loaders)}
    except LoaderError as error:
        raise SettingsError(
            f"The training loader cannot be tuned: {error}. Pass a LightningDataModule, or torch DataLoaders."
        ) from error
    first = next(iter(parts))
    chosen = first if name is None and len(parts) == 1 else name
    if chosen in parts:
        return parts[chosen]
    if len(parts) == 1:
        raise SettingsError(f"loader={name!r}: there is only one training loader. Leave the name out.")
    what = "Tune them one by one" if name is None else f"None is named {name!r}"
    raise SettingsError(
        f"There are {len(parts)} training loaders: {', '.join(parts)}. {what}: --loader {first} on the command line, "
        f"loader={first!r} in a call of tune()."
    )
