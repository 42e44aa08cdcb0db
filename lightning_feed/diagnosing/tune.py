"""``tune`` and its command, which find loader settings by trials, without side effects."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from lightning_feed.diagnosing.batches import own_loaders
from lightning_feed.diagnosing.failures import user_errors
from lightning_feed.diagnosing.parts import parts_of
from lightning_feed.diagnosing.program import Fit
from lightning_feed.diagnosing.proof import Proof, prove, proven
from lightning_feed.diagnosing.restoring import quiet
from lightning_feed.diagnosing.session import Session, open_session
from lightning_feed.diagnosing.short_fits import FitLength, replay
from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.extras import require
from lightning_feed.in_fit.goal import (
    KEEPS,
    fills_a_cache,
    name_of_model,
    rehearsal_of,
    steps_per_epoch,
    why_fixed,
    why_left_alone,
)
from lightning_feed.load.kinds import Batch
from lightning_feed.load.processes import end_pass
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.rehearsal import Rehearsal
from lightning_feed.load.settings import MOST, Setting
from lightning_feed.machine.limits import read_machine
from lightning_feed.machine.private_files import atomic_write
from lightning_feed.measure.cpu_time import OtherPrograms
from lightning_feed.measure.measurements import OTHERS_PCT, LoaderCode
from lightning_feed.trials.cloning import Changes, clone_loader
from lightning_feed.trials.search import Trial
from lightning_feed.trials.training_work import TrainingWork
from lightning_feed.trials.trial import TrialLimits, limits_of, run_trial
from lightning_feed.trials.tune_loader import Goal, Store, Tuned, key_of, tune_loader
from lightning_feed.verdict.paste import Paste, Settings, arguments, pastes
from lightning_feed.verdict.remedies import DATALOADER
from lightning_feed.wording import in_rate, plural, rate_unit

REPLAY_STEPS = 300
FEWEST_STEPS = 12
REPLAY_S = 5.0
PROOF_S = 5.0

# --- results as text, JSON, code to paste, and a plot ----------------------------------------------------------------

SCHEMA = "lightning_feed.tuning/1"
_BAR = 30
_MIB = 2**20


def tuned_text(tuned: Tuned, loader_code: LoaderCode | None = None) -> str:
    """Format the result as text: a table of the trials, the choice with its reason, and code to paste.

    Args:
        tuned: result of tuning.
        loader_code: the code that sets up the loader; None if unknown.
    """
    lines = ["workers  ahead  measured"]
    lines += [_row(trial, tuned) for trial in tuned.trials]
    if any(trial.start_share_s for trial in tuned.trials):
        lines += ["", "Each step has its share of the time in which an epoch's workers start."]
    how = f"{plural(len(tuned.trials), 'setting')} tried, {tuned.seconds:.0f} s"
    if tuned.remembered:
        how = f"found by an earlier run ({how}); --fresh tries again"
    lines += ["", f"{_short(tuned.setting)}: {tuned.reason}", how]
    if tuned.others_pct >= OTHERS_PCT:
        lines += [
            f"Other programs took {tuned.others_pct:.0f} % of the CPUs meanwhile, so this is not remembered: try again "
            "when they have ended."
        ]
    if tuned.setting == tuned.own:
        return "\n".join([*lines, "Your loader has this setting already."])
    for paste in ways_to_apply(tuned, loader_code):
        lines += ["", f"{paste.where}:", *(f"    {line}" for line in paste.code.splitlines())]
    return "\n".join(lines)


def _row(trial: Trial, tuned: Tuned) -> str:
    setting = trial.setting
    notes = []
    if setting.workers == "thread" and setting.num_workers:
        notes.append("threads")
    if trial is tuned.trial_of(tuned.own):
        notes.append("yours")
    if trial is tuned.trial_of(tuned.setting):
        notes.append("<- chosen")
    measured = f"{tuned.in_words(trial)}  {' '.join(notes)}".rstrip()
    return f"{setting.num_workers:>7}  {setting.prefetch_factor or '-':>5}  {measured}"


def _short(setting: Setting) -> str:
    text = plural(setting.num_workers, "thread" if setting.workers == "thread" else "worker")
    if setting.num_workers:
        text += f", prefetch_factor={setting.prefetch_factor}"
    return text


def tuned_document(tuned: Tuned, loader_code: LoaderCode | None = None) -> dict[str, Any]:
    """Convert the result for JSON, with a schema name. Times are in seconds."""
    return {
        "schema": SCHEMA,
        **asdict(tuned),
        "step_s": tuned.step_s,
        "code": paste_line(tuned),
        "paste": [asdict(paste) for paste in ways_to_apply(tuned, loader_code)],
    }


# --- what to paste ----------------------------------------------------------------------------------------------------


def ways_to_apply(tuned: Tuned, loader_code: LoaderCode | None) -> list[Paste]:
    """Return code to paste, in the forms that fit the code that sets up the loader, the best form first.

    If that code is unknown, returns one form for a DataLoader and one for a FastDataModule.
    """
    settings = Paste("in the call that makes your FastDataModule", "settings", paste_line(tuned))
    values = _values(tuned)
    if "workers" in values:  # threads: a DataLoader cannot use them
        return [settings]
    code = loader_code or DATALOADER
    if not tuned.setting.num_workers and code.form != "settings":
        # torch refuses no workers with options that need workers
        values |= {"prefetch_factor": None, "persistent_workers": False}
    return pastes(code, values) if loader_code is not None else [*pastes(code, values), settings]


def paste_line(tuned: Tuned) -> str:
    """Return the line of code that applies the tuned setting to a FastDataModule."""
    return f"loader=LoaderSettings({arguments(_values(tuned))})"


def _values(tuned: Tuned) -> Settings:
    setting = tuned.setting
    values: Settings = {"num_workers": setting.num_workers}
    if setting.num_workers:
        if setting.workers != "process":
            values["workers"] = setting.workers
        values["prefetch_factor"] = setting.prefetch_factor
        values["persistent_workers"] = setting.persistent_workers
    values["pin_memory"] = setting.pin_memory
    return values


# --- sweeps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The rates of a loader, without training, for each number of workers in a grid."""

    trials: tuple[Trial, ...]
    """Trials, ordered by number of workers. A setting that could not run, or would break a limit, has the reason."""
    batch_size: int | None = None
    """Samples per batch; None if unknown, and then rates are in batches."""
    chosen: Setting | None = None
    """The tuner's choice, which may be outside the grid; None if nothing was tuned."""
    seconds: float = 0.0
    """Seconds that the sweep took."""

    def rate(self, trial: Trial) -> float | None:
        """Return a trial's samples per second, or batches per second if the batch size is unknown.

        Returns None if the trial could not run.
        """
        if not trial.steps_s:
            return None
        return (self.batch_size or 1) / trial.step_s

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for JSON."""
        rows = [{**asdict(trial), "per_s": self.rate(trial), "tuned": self._is_chosen(trial)} for trial in self.trials]
        return {**asdict(self), "trials": rows}

    def text(self) -> str:
        """Format as a table with a bar for each rate, in plain characters."""
        top = max((self.rate(trial) or 0.0 for trial in self.trials), default=0.0)
        lines = [f"workers {rate_unit(self.batch_size):>11}   memory"]
        lines += [self._line(trial, top) + ("  <- tuned" if self._is_chosen(trial) else "") for trial in self.trials]
        if self.chosen is not None and not any(map(self._is_chosen, self.trials)):
            lines.append(f"tuned: {self.chosen}, which is not on this grid")
        return "\n".join(lines)

    def _is_chosen(self, trial: Trial) -> bool:
        chosen = self.chosen
        if chosen is None:
            return False
        return (chosen.num_workers, chosen.workers) == (trial.setting.num_workers, trial.setting.workers)

    def _line(self, trial: Trial, top: float) -> str:
        workers = trial.setting.num_workers
        rate = self.rate(trial)
        if rate is None:
            return f"{workers:>7} {'-':>11}  {trial.infeasible or 'it could not run'}"
        memory = f"{trial.memory_bytes / _MIB:,.0f}M" if trial.memory_bytes is not None else "-"
        bar = "#" * max(1, round(_BAR * rate / top))
        return f"{workers:>7} {in_rate(rate):>11} {memory:>8}  {bar}"


def write_plot(sweep: Sweep, path: Path) -> Path:
    """Plot samples per second and memory against the number of workers, as a PNG file.

    The file is written atomically. Matplotlib's global state, including its backend, is not touched.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = require("matplotlib.figure", extra="plot", why="the plot of a sweep").Figure
    canvas = figure(figsize=(7, 6), layout="constrained")
    rates, memory = canvas.subplots(2, sharex=True)
    workers = [trial.setting.num_workers for trial in sweep.trials]
    in_mib = [None if trial.memory_bytes is None else trial.memory_bytes / _MIB for trial in sweep.trials]
    # matplotlib draws no point where a value is None
    rates.plot(workers, [sweep.rate(trial) for trial in sweep.trials], marker="o")
    memory.plot(workers, in_mib, marker="o")
    rates.set_ylabel(rate_unit(sweep.batch_size))
    memory.set_ylabel("memory of the workers in MiB")
    memory.set_xlabel("num_workers")
    for axis in (rates, memory):
        axis.set_ylim(bottom=0)
        if sweep.chosen is not None:
            axis.axvline(sweep.chosen.num_workers, color="tab:green", label=f"tuned: {sweep.chosen}")
    if sweep.chosen is not None:
        rates.legend()
    image = BytesIO()
    canvas.savefig(image, format="png")
    with atomic_write(path) as file:
        file.write(image.getvalue())
    return path


# --- tune ------------------------------------------------------------------------------------------------------------


def tune(  # all but the target are by name, and have a default
    target: Any,
    *,
    model: Any = None,
    trainer: Any = None,
    budget_s: float = 30.0,
    fresh: bool = False,
    loader: str | None = None,
) -> Tuned:
    """Find loader settings for a data module or a DataLoader, without changing either.

    With a model, finds the setting with which its training steps are shortest; without a model, the setting with which
    the loader is fastest. Your own setting stays unless another makes steps more than 3 % shorter, and is faster in
    each of up to three turns. A rehearsal sees first whether samples stay the same in workers; if not, their number
    stays. The result is stored for the machine, model, samples, batch size and package versions, unless the time ended
    the search, its turns disagree, or other programs were busy. Samples are read in copies of this process: see
    docs/how-to/tune.md for datasets with effects outside.

    Args:
        target: a LightningDataModule, which is prepared and set up for "fit", or torch DataLoaders.
        model: the LightningModule. Its training step is measured on one batch for some seconds.
        trainer: the Trainer for the settings of the run. Loaders for all its local ranks are tried at once.
        budget_s: seconds for the rehearsal and the trials. After that time no trial runs.
        fresh: True to ignore remembered results.
        loader: key or number of the loader to tune, such as ``"cls"``, if there are several.

    Raises:
        SettingsError: the target cannot be tuned, or more workers would change what is trained.
        DatasetError: the dataset raises an error.
        LoaderError: the loader is empty, or hangs.

    Returns:
        The setting, its reason and the trials.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from lightning_feed import tune
        >>> loader = DataLoader(range(10_000), batch_size=100)
        >>> tune(loader, budget_s=10, fresh=True).own.num_workers
        0
    """
    goal = Goal(budget_s=budget_s)
    if trainer is not None:
        goal = replace(goal, local_ranks=trainer.num_devices)
    with open_target_session(target, model, trainer, loader) as (session, training_loader):
        return tune_in_session(session, training_loader, goal, fresh=fresh)


def tune_in_session(session: Session, loader: DataLoader[Batch], goal: Goal, *, fresh: bool) -> Tuned:
    """Find the settings for a loader, with a progress bar on stderr.

    Args:
        session: training session. If it has a model, the work of the model's training step is measured.
        loader: the training loader.
        goal: the limits. The device follows from the Trainer.
        fresh: as for :func:`tune`.

    Raises:
        SettingsError: other workers would change what is trained.
    """
    rehearsal = _rehearsed(loader, goal.budget_s)
    device = session.trainer.strategy.root_device
    goal = replace(goal, device_type=device.type, steps_per_epoch=steps_per_epoch(session.trainer, loader))
    others = OtherPrograms()
    with tqdm(desc="tune", unit=" trials", disable=None, leave=False) as bar:
        if session.model is not None:
            bar.set_description_str("tune: the training step")
            goal = replace(goal, work=measure_work(session), model=name_of_model(session.model))
            bar.set_description_str("tune")
        key = key_of(loader, goal, session.machine, rehearsal)
        remembered = None if fresh else Store().load(key)
        if remembered is not None:
            return remembered
        tuned = tune_loader(loader, goal, rehearsal=rehearsal, machine=session.machine, on_trial=lambda _: bar.update())
        proof = None
        if session.model is not None:
            bar.set_description_str("tune: training with the result")
            proof = _prove(session, tuned)
    if proof is not None:
        tuned = proven(tuned, proof)
    others_pct = max(tuned.others_pct, others.others_pct(session.machine.usable_cpus) or 0.0)
    tuned = replace(tuned, others_pct=others_pct, batch_size=tuned.batch_size or batch_size_of(loader))
    if tuned.whole and others_pct < OTHERS_PCT:
        Store().save(key, tuned, final=proof is not None)
    return tuned


def _rehearsed(loader: DataLoader[Batch], budget_s: float) -> Rehearsal:
    """Return the rehearsal of a loader that may be tuned.

    Raises:
        SettingsError: other workers would change what is trained.
    """
    rehearsal = Rehearsal()
    why_not = why_fixed(loader)
    if not why_not:
        rehearsal = rehearsal_of(loader, budget_s)
        why_not = why_left_alone(loader, rehearsal)
    if not why_not and fills_a_cache(loader, rehearsal):
        why_not = KEEPS
    if why_not:
        raise SettingsError(f"The training loader cannot be tuned: {why_not}.")
    return rehearsal


def _prove(session: Session, tuned: Tuned) -> Proof | None:
    """Train with the result and with the user's setting. Returns None if the model trains on several loaders, or if
    nothing could be compared."""
    if not isinstance(session.train_loaders, DataLoader):
        return None
    with user_errors("training with the result failed"):
        return prove(session, tuned, seconds=PROOF_S)


def batch_size_of(loader: DataLoader[Batch]) -> int | None:
    """Return the samples per batch; None if unknown."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


# --- the command ------------------------------------------------------------------------------------------------------


def run_tune(
    fit: Fit, *, fresh: bool = False, grid: Sequence[int] = (), loader: str | None = None
) -> tuple[Tuned, Sweep | None, LoaderCode | None]:
    """Tune a loader, and sweep numbers of workers if requested. Also returns the code that makes the loader, if known.

    Args:
        fit: the module and the data.
        fresh: as for :func:`tune`.
        grid: numbers of workers to sweep; empty for no sweep.
        loader: key or number of the loader, if there are several.

    Raises:
        FeedError: as for ``tune``, or the grid contains an impossible number of workers.
    """
    wrong = [workers for workers in grid if not 0 <= workers <= MOST]
    if wrong:  # before seconds are spent on trials
        raise SettingsError(f"--sweep: {wrong[0]} is not a number of workers. Use whole numbers from 0 to {MOST}.")
    target = fit.model
    if fit.datamodule is not None:
        target = fit.datamodule
    elif fit.train_dataloaders is not None:
        target = fit.train_dataloaders
    with open_target_session(target, fit.model, fit.trainer, loader) as (session, training_loader):
        tuned = tune_in_session(session, training_loader, Goal(), fresh=fresh)
        loader_code = session.loader_code()
        if not grid:
            return tuned, None, loader_code
        with tqdm(total=len(grid), desc="sweep", disable=None, leave=False) as bar:
            sweep = sweep_loader(training_loader, grid, bar.update)
    return tuned, replace(sweep, chosen=tuned.setting), loader_code


def sweep_loader(loader: DataLoader[Batch], grid: Iterable[int], on_trial: Callable[[], object]) -> Sweep:
    """Measure a loader, without training, with each number of workers in a grid. Leaves the loader unchanged.

    Args:
        loader: any DataLoader.
        grid: numbers of workers, in any order. Numbers that would break a limit of this machine are listed, not tried.
        on_trial: called after each trial.

    Raises:
        DatasetError: the dataset raised an error without workers.
        LoaderError: the loader is empty, or hangs without workers.

    Returns:
        A Sweep with the trials ordered by number of workers, and without ``chosen``.
    """
    began_s = time.perf_counter()
    limits = limits_of(loader, read_machine())
    own = Setting.of(loader)
    trials: list[Trial] = []
    for workers in sorted(set(grid)):
        setting = own.with_workers(workers)
        exceeded = limits.broken(setting, trials)
        if exceeded:
            trials.append(Trial(setting=setting, infeasible=exceeded))
        else:
            trials.append(run_trial(loader, setting, TrainingWork(), TrialLimits(min_s=1.0)))
        on_trial()
    seconds = time.perf_counter() - began_s
    return Sweep(trials=tuple(trials), batch_size=batch_size_of(loader), seconds=seconds)


# --- the loader to tune, and its model's demand -----------------------------------------------------------------------


@contextmanager
def open_target_session(
    target: object, model: object, trainer: object, name: str | None = None
) -> Iterator[tuple[Session, DataLoader[Batch]]]:
    """Open a session, and find a target's training loader, as a context manager. On exit, everything is restored.

    Args:
        target: a data module, which is prepared and set up; loaders; or ``model``, if it has ``train_dataloader``.
        model: the module, or None.
        trainer: the user's Trainer; None for a new Trainer, on the device that Lightning chooses.
        name: key of the loader if there are several, as in messages.

    Raises:
        SettingsError: the target is of another kind, has several training loaders or no DataLoader, or the Trainer
            cannot be used.
        FeedError: the set-up of the data module fails.
    """
    datamodule = None
    loaders = None
    if not hasattr(target, "train_dataloader"):
        loaders = target
    elif target is not model:
        datamodule = target
    session = open_session(trainer, model, datamodule, loaders)
    with quiet(), session.restoring():
        with user_errors("the data module could not be set up"):
            session.set_up()
        yield session, _named_loader(session, name)


def measure_work(session: Session) -> TrainingWork:
    """Measure the work of a training step, by a fit that repeats one batch, including its transfer to the device.

    The batch is loaded before the fit, and kept on the host. With PrefetchCallback its copy to the device overlaps with
    computing; without PrefetchCallback the copy is part of the step.

    Raises:
        FeedError: the fit fails, or is too slow to be measured.
    """
    with user_errors("a batch could not be loaded"), preserve_state(session.train_loaders):
        batch = _first_batch(session)
    if batch is None:
        raise LoaderError("The training loader yields no batch. Check the length of the dataset, and drop_last.")
    accumulate = session.trainer.accumulate_grad_batches
    limits = FitLength(min_steps=FEWEST_STEPS * accumulate, max_steps=REPLAY_STEPS * accumulate, seconds=REPLAY_S)
    began_s = time.perf_counter()
    began_cpu_s = time.thread_time()
    with user_errors("training on one batch again and again failed"):
        per_s = replay(session, [batch], limits, on_device=False)
    if per_s is None:
        raise LoaderError(
            "Training repeatedly on one batch was too slow to measure. Leave the model out to look for the fastest "
            "loader."
        )
    busy = (time.thread_time() - began_cpu_s) / (time.perf_counter() - began_s)
    on_device = session.trainer.strategy.root_device.type != "cpu"
    return TrainingWork(
        step_s=1 / per_s,
        cpu_s=min(1.0, busy) / per_s,
        threads=1 if on_device else torch.get_num_threads(),
        on_device=on_device,
    )


def _first_batch(session: Session) -> Any:
    """Load the loop's first batch, with a part from each loader, without workers. Returns None if there is no batch."""
    loaders = own_loaders(session.train_loaders, _without_workers)
    if isinstance(loaders, DataLoader):
        batches = iter(loaders)
        try:
            return next(batches, None)
        finally:
            end_pass(batches)
    combined = session.lightning.utilities.CombinedLoader
    if not isinstance(loaders, combined):
        loaders = combined(loaders, "max_size_cycle")  # as a fit would
    batch, _, _ = next(iter(loaders), (None, 0, 0))
    return batch


def _without_workers(loader: DataLoader[Batch]) -> DataLoader[Batch]:
    return clone_loader(loader, Changes(setting=Setting.of(loader).with_workers(0)))


def _named_loader(session: Session, name: str | None) -> DataLoader[Batch]:
    try:
        parts = {part.name: part.loader for part in parts_of(session.train_loaders)}
    except LoaderError as error:
        raise SettingsError(
            f"The training loader cannot be tuned: {error}. Pass a LightningDataModule, or torch DataLoaders."
        ) from error
    first = next(iter(parts))
    if name is None and len(parts) == 1:
        return parts[first]
    if name in parts:
        return parts[name]
    if len(parts) == 1:
        raise SettingsError(f"loader={name!r}: there is only one training loader. Leave the name out.")
    advice = "Tune them one by one" if name is None else f"None is named {name!r}"
    raise SettingsError(
        f"There are {len(parts)} training loaders: {', '.join(parts)}. {advice}: --loader {first} on the command line, "
        f"loader={first!r} in a call of tune()."
    )
