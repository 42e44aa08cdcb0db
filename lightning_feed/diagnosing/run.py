"""diagnose: the choice, order and duration of experiments, and the verdict on their results."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.diagnosing import functions, less_work, lighter_samples, rates, samples
from lightning_feed.diagnosing.batches import own_loaders
from lightning_feed.diagnosing.failures import (
    DiagnosisFailed,
    DiagnosisInterrupted,
    DiagnosisNotWritten,
    in_a_line,
    user_errors,
)
from lightning_feed.diagnosing.parts import NotMeasurable, parts_of
from lightning_feed.diagnosing.proof import Proof, own_workers, prove, proven, threads_left, try_fewer_threads
from lightning_feed.diagnosing.restoring import ModelState, quiet
from lightning_feed.diagnosing.session import Session, open_session
from lightning_feed.diagnosing.short_fits import AS_IT_IS, LATEST, FitLength, replay, run_as_it_is
from lightning_feed.errors import FeedError, LoaderError, ReportError, SettingsError
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.machine.limits import read_machine
from lightning_feed.measure.experiment_results import REST_OF_THE_FIT, ExperimentResults, TriedSetting
from lightning_feed.measure.facts import loader_facts
from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.measure.stats import StarvationStats
from lightning_feed.report.document import make_report
from lightning_feed.report.files import check_writable, write_report
from lightning_feed.trials.tune_loader import Tuned
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Diagnosis

MODEL = "model"
"""Name of the experiment that replays batches of the run on the device."""
LOADER_EXPERIMENTS = {
    "loader": ("loader", "keys", "workers"),
    "cached-files": ("cached-files",),
    "transforms": ("transforms", "functions", "no-transforms", "crops", "lighter-samples"),
    "constant-samples": ("constant-samples",),
}
"""The experiments with the loader alone, and the parts of each."""
EXPERIMENTS = (MODEL, *LOADER_EXPERIMENTS)
BUDGET_S = 90.0
QUICK_BUDGET_S = 30.0
RUN_SHARE = 0.17
REPLAY_SHARE = 0.08
PROOF_SHARE = 0.15
THREADS_SHARE = 0.1
"""Shares of the time budget for the unchanged run, for the replay, for training with other workers, and for training
with fewer threads of torch, where that may help. The experiments with the loader get the rest."""
RUN_STEPS = 200
REPLAY_STEPS = 300
QUICK_RUN_STEPS = 80
QUICK_REPLAY_STEPS = 80
FEWEST_STEPS = 8
"""Fewest optimizer steps of a replay of one batch."""
PASSES = 5
"""Fewest passes over the replayed batches, of which the first are warm-up, and at least two must count."""
FEWEST_RUN_STEPS = 12
"""Fewest steps of the run: the first step does not count, and a verdict needs ten."""
CALLBACK_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
"""Hooks of callbacks that are called in training."""
BAR = "{desc} {bar} {percentage:3.0f}%"


def diagnose(  # noqa: PLR0913  # one call that says what to train and how far to go; all but three by name
    trainer: Any,
    model: Any,
    datamodule: Any = None,
    *,
    train_dataloaders: AnyLoader = None,
    quick: bool = False,
    only: Sequence[str] = EXPERIMENTS,
    out: str | Path | None = None,
    budget_s: float | None = None,
) -> Diagnosis:
    """Find what limits training by experiments.

    Trains for some seconds on one device: first with the loaders unchanged, then with the same batches repeated on the
    device. Loggers, checkpoints, validation, callbacks other than PrefetchCallback, and the module's hooks for the end
    of a training do not run; the report names them. Then measures the training loader alone, with parts of its work
    left out.

    Afterwards these are restored: the ``state_dict`` of the module, and of optimizers and schedulers in its attributes;
    ``requires_grad``, ``train()`` and ``eval()``; the random states of torch, numpy and Python;
    your own loaders. Gradients are dropped. Other changes that your code makes in a training step or a dataset remain.
    To avoid such changes, use the command ``lightning-feed diagnose``, which runs in a separate process.

    Args:
        trainer: the Trainer to copy settings from; None for a new Trainer, on the device that Lightning chooses.
        model: the module; None to measure only the loader.
        datamodule: the data module, or a training DataLoader; None if ``train_dataloaders`` or the module has the data.
        train_dataloaders: as for ``Trainer.fit``.
        quick: True to take a third of the time.
        only: experiments to run, such as "model" and "loader". With a module, the unchanged run always comes first.
        out: folder for ``feed_report.json``, ``.md`` and ``.html``; None to write no files.
        budget_s: approximate total seconds. By default 90, or 30 with ``quick``.

    Raises:
        SettingsError: if there is nothing to load from, or the Trainer cannot be used.
        ReportError: if ``out`` cannot be written to. Nothing was run then.
        FeedError: if the unchanged run fails. The cause is attached.
        DiagnosisFailed: if your code fails later. The exception has the results so far.
        DiagnosisNotWritten: if the files cannot be written at the end. The exception has the verdict.
        DiagnosisInterrupted: on Ctrl-C. The exception has the results so far.
    """
    plan = _Scope(only, BUDGET_S, RUN_STEPS, REPLAY_STEPS)
    if quick:
        plan = _Scope(only, QUICK_BUDGET_S, QUICK_RUN_STEPS, QUICK_REPLAY_STEPS)
    if budget_s is not None:
        plan = replace(plan, budget_s=budget_s)
    _check(plan)
    if out is not None:
        check_writable(Path(out))  # before a minute of experiments, not after it
    session = _open(trainer, model, datamodule, train_dataloaders)
    stopped = _run(session, plan)
    diagnosis = decide(measurements_of(session))
    written, problem = _write(diagnosis, out)
    if isinstance(stopped, FeedError):
        raise DiagnosisFailed(str(stopped), diagnosis, written) from (stopped.__cause__ or stopped)
    if stopped is not None:
        raise DiagnosisInterrupted("diagnose() was interrupted", diagnosis, written) from stopped
    if problem is not None:
        raise DiagnosisNotWritten(str(problem), diagnosis, written) from problem
    return diagnosis


def _check(plan: "_Scope") -> None:
    if plan.budget_s <= 0:
        raise SettingsError(f"budget_s={plan.budget_s!r}: give the seconds that the experiments may take, more than 0.")
    unknown = [name for name in plan.only if name not in EXPERIMENTS]
    if unknown or not plan.only:
        raise SettingsError(f"only={plan.only!r}: give a list of any of {', '.join(EXPERIMENTS)}.")


def _open(trainer: object, model: object, datamodule: Any, loaders: object) -> Session:
    if datamodule is not None and loaders is not None:
        raise SettingsError("Give diagnose() a datamodule or train_dataloaders, not both, as for Trainer.fit.")
    if datamodule is None and loaders is None:
        datamodule = getattr(trainer, "datamodule", None)
    if datamodule is None and loaders is None and not _host.is_overridden(model, "train_dataloader"):
        raise SettingsError(
            "diagnose() found no training loader. Give it a datamodule, or train_dataloaders=, or a module with a "
            "train_dataloader() of its own."
        )
    return open_session(trainer, model, datamodule, loaders)


def _run(session: Session, plan: "_Scope") -> FeedError | KeyboardInterrupt | None:
    """Run the experiments, and restore what they changed. Returns the exception that ended them early, or None.

    Raises:
        FeedError: the experiments failed before anything was measured.
    """
    try:
        bar = tqdm(total=100, desc="diagnose", disable=None, leave=False, bar_format=BAR)
        with bar, quiet(), session.restoring() as state:
            _Experiments(session, plan, bar).run(state)
    except KeyboardInterrupt as stop:
        return stop
    except FeedError as error:
        if not _has_results(session):
            raise
        return error
    return None


def _has_results(session: Session) -> bool:
    """Return True if an experiment, or the unchanged run, has a result."""
    measured = session.measured is not None and session.measured.stats.step_ms is not None
    return measured or session.results != ExperimentResults()


def measurements_of(session: Session) -> Measurements:
    """All measurements of a session so far, for the verdict."""
    measured = session.measured
    if measured is None:
        loaders: list[AnyLoader] = []
        with suppress(LoaderError):  # without a DataLoader, no facts are known
            loaders = [part.loader for part in parts_of(session.train_loaders)]
        facts = LoopFacts(
            device_type=session.device.type,
            usable_cpus=read_machine().usable_cpus,
            loader=loader_facts(loaders),
        )
        measured = Measurements(stats=StarvationStats(steps=0, confidence="low"), facts=facts)
    batch_size = session.results.batch_size or measured.facts.loader.batch_size
    return replace(measured, experiments=replace(session.results, batch_size=batch_size), diagnosed=True)


def _write(diagnosis: Diagnosis, out: str | Path | None) -> tuple[list[Path], ReportError | None]:
    """Write the report's files. Returns (files, error): the error is not raised, so that the verdict is not lost."""
    if out is None:
        return [], None
    try:
        return write_report(make_report(diagnosis), out), None
    except ReportError as error:
        return [], error


# --- all experiments ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scope:
    """The experiments to run, and the time for them."""

    only: Sequence[str]
    budget_s: float
    run_steps: int
    """Most steps of the unchanged run."""
    replay_steps: int
    """Most optimizer steps of the replay."""


class _Experiments:
    """The experiments of one diagnosis. They add results to the session one by one, so Ctrl-C loses none of them."""

    def __init__(self, session: Session, plan: _Scope, bar: Any) -> None:
        self.session = session
        self.plan = plan
        self._bar = bar

    def run(self, state: ModelState) -> None:
        """Run all experiments.

        Args:
            state: the module's state before the run, which is restored before each further fit.

        Raises:
            FeedError: if the unchanged run fails.
        """
        session = self.session
        if session.model is None:
            if MODEL in self.plan.only:
                session.leave_out(MODEL, "no module was given")
            with user_errors("the data module could not be set up"):
                session.set_up()
        else:
            self._run_as_it_is()
            # The replay begins with the weights from before the run: a long fit of one batch moves them far away.
            state.restore()
            if MODEL in self.plan.only:
                self._replay()
                state.restore()
        self._measure_loader()
        if session.tuned is not None:
            self._prove(session.tuned)
            state.restore()
        if self._may_use_fewer_threads():
            self._try_fewer_threads()
            state.restore()
        try:
            session.tear_down()
        except Exception as error:  # noqa: BLE001  # what was measured is worth more
            session.leave_out("teardown", f"the data module's teardown failed: {in_a_line(error)}")
        self._bar.update(self._bar.total - self._bar.n)

    def _run_as_it_is(self) -> None:
        session = self.session
        seconds = RUN_SHARE * self.plan.budget_s
        fit_length = FitLength(min_steps=FEWEST_RUN_STEPS, max_steps=self.plan.run_steps, seconds=seconds)
        self._show("the run as it is", 0.0)
        with user_errors(AS_IT_IS):
            run_as_it_is(session, fit_length)
        left_out = _left_out_of_the_fit(session)
        if left_out:
            session.leave_out(REST_OF_THE_FIT, left_out)
        if session.trainer.num_devices * session.trainer.num_nodes > 1:
            why = "trained on one device; to compare ranks, use GPUStarvationCallback() in the run itself"
            session.leave_out("ranks", why)

    def _replay(self) -> None:
        session = self.session
        if _host.takes_iterator(session.model):  # so no batches were kept
            session.leave_out(MODEL, "training_step takes dataloader_iter, and fetches for itself")
            return
        if not session.device_batches.batches:
            session.leave_out(MODEL, "the unchanged run gave no batch")
            return
        batches, fit_length = self._batches_and_length()
        self._show("model: the same batches on the device again and again", RUN_SHARE)
        try:
            per_s = replay(session, batches, fit_length, on_device=True)
        except Exception as error:  # noqa: BLE001  # the other experiments do not need this one
            session.leave_out(MODEL, f"it failed: {in_a_line(error)}")
            return
        session.note(model_per_s=per_s)
        if per_s is None:
            session.leave_out(MODEL, "too few steps in the available time: allow more time, or leave --quick out")

    def _batches_and_length(self) -> tuple[list[Batch], FitLength]:
        """Choose the run's batches to replay, only one if there is no time for more, and the length of the fit."""
        session = self.session
        seconds = REPLAY_SHARE * self.plan.budget_s
        accumulate = session.trainer.accumulate_grad_batches
        most = accumulate * self.plan.replay_steps
        fewest = accumulate * FEWEST_STEPS
        batches = session.device_batches.batches
        step_ms = session.measured and session.measured.stats.step_ms
        needed = PASSES * math.lcm(accumulate, len(batches))
        if needed > most or needed * (step_ms or 0.0) * 1e-3 > LATEST * seconds:
            return batches[:1], FitLength(min_steps=fewest, max_steps=most, seconds=seconds)
        return batches, FitLength(min_steps=max(needed, fewest), max_steps=most, seconds=seconds)

    def _measure_loader(self) -> None:
        session = self.session
        wanted = [name for name in LOADER_EXPERIMENTS if name in self.plan.only]
        if not wanted:
            return
        spent_share, share = self._loader_shares()
        begun: list[str] = []

        def on_progress(name: str, done: float) -> None:
            begun.append(name)
            self._show(f"{name}: {STEPS[name].what}", spent_share + share * done)

        session.train_loaders = own_loaders(session.train_loaders)
        try:
            measure_loaders(
                session,
                budget_s=share * self.plan.budget_s,
                only=[part for name in wanted for part in LOADER_EXPERIMENTS[name]],
                on_progress=on_progress,
            )
        except FeedError as error:
            if session.measured is None:
                raise
            finished = begun[:-1]
            for name in wanted:
                if name not in finished:
                    session.leave_out(name, str(error))

    def _loader_shares(self) -> tuple[float, float]:
        """Return the shares of the time budget before the experiments with the loader, and for them."""
        if self.session.model is None:
            return 0.0, 1.0
        spent = RUN_SHARE + REPLAY_SHARE
        later = PROOF_SHARE
        if self._may_use_fewer_threads():
            later += THREADS_SHARE
        return spent, 1.0 - spent - later

    def _prove(self, tuned: Tuned) -> None:
        """Train with the setting that the trials chose. If that is no faster, the user's setting counts as chosen."""
        session = self.session
        later_share = THREADS_SHARE if self._may_use_fewer_threads() else 0.0
        self._show("training with other workers", 1 - PROOF_SHARE - later_share)
        try:
            proof = prove(session, tuned, seconds=PROOF_SHARE / 2 * self.plan.budget_s)
        except Exception as error:  # noqa: BLE001  # what was measured is worth more
            session.leave_out("training with other workers", f"it failed: {in_a_line(error)}")
            return
        if proof is None:
            return
        session.tuned = proven(tuned, proof)
        session.note(
            own_fit_ms=proof.own_ms,
            chosen_fit_ms=proof.chosen_ms,
            trained_workers=proof.setting.num_workers,
            why_chosen=session.tuned.reason,
            inconclusive=session.results.inconclusive and not proof.holds,
            tried=_with_proof(session.results.tried, session.tuned, proof),
        )

    def _may_use_fewer_threads(self) -> bool:
        wants_loader = any(name in self.plan.only for name in LOADER_EXPERIMENTS)
        return wants_loader and threads_left(self.session, own_workers(self.session)) is not None

    def _try_fewer_threads(self) -> None:
        """Train with fewer threads of torch, beside the workers that are best so far."""
        session = self.session
        setting = None if session.tuned is None else session.tuned.setting
        self._show("training with fewer threads of torch", 1 - THREADS_SHARE)
        try:
            threads = try_fewer_threads(session, setting, seconds=THREADS_SHARE / 2 * self.plan.budget_s)
        except Exception as error:  # noqa: BLE001  # what was measured is worth more
            session.leave_out("training with fewer threads of torch", f"it failed: {in_a_line(error)}")
            return
        session.note(threads=threads)

    def _show(self, description: str, share: float) -> None:
        """Show the current experiment, and the share of time used, on the progress bar."""
        self._bar.set_description_str(description)
        self._bar.update(100 * share - self._bar.n)


def _with_proof(tried: Sequence[TriedSetting], tuned: Tuned, proof: Proof) -> tuple[TriedSetting, ...]:
    """Mark the setting that training has chosen among those that were tried, and add it if no trial had it."""
    workers = tuned.setting.num_workers
    ahead = tuned.setting.prefetch_factor
    settings = [
        replace(setting, chosen=(setting.num_workers, setting.prefetch_factor) == (workers, ahead)) for setting in tried
    ]
    if not any(setting.chosen for setting in settings):
        ms = proof.chosen_ms
        trained = TriedSetting(
            num_workers=workers, prefetch_factor=ahead, step_ms=ms, shortest_ms=ms, longest_ms=ms, chosen=True
        )
        settings.append(trained)
        settings.sort(key=lambda setting: setting.num_workers)
    return tuple(settings)


# --- experiments on loading ---------------------------------------------------------------------------------------

_LEAST_S = 0.3
"""Shortest time for an experiment. With less time left, it is not started."""


@dataclass(frozen=True)
class Experiment:
    """An experiment on loading."""

    what: str
    """Short description for the progress bar."""
    measure: Callable[[Session], None]
    """Function that adds figures to the session's results, or raises NotMeasurable."""
    weight: float
    """The experiment's share of the time, relative to the weights of the others."""
    needs_rate: bool = False
    """True if the experiment needs the result of the experiment ``loader``."""
    any_iterable: bool = False
    """True if the experiment works with any iterable, not only with DataLoaders."""


STEPS = {
    "loader": Experiment("the loader alone, as configured", rates.measure_loader, 4.0, any_iterable=True),
    "keys": Experiment("bytes of each part of a batch", rates.measure_keys, 0.0, needs_rate=True, any_iterable=True),
    "functions": Experiment("your functions, by time", functions.measure_functions, 0.7),
    "constant-samples": Experiment("constant samples, same workers", rates.measure_ceiling, 1.6),
    "transforms": Experiment("reading, decoding and each transform", samples.measure_costs, 1.3),
    "no-transforms": Experiment("transforms left out", less_work.measure_without_transforms, 1.0),
    "crops": Experiment("only the crops decoded", less_work.measure_crops, 1.0),
    "lighter-samples": Experiment("less work for each sample", lighter_samples.measure_lighter_samples, 1.5),
    "cached-files": Experiment("files in memory", rates.measure_files_in_memory, 3.0, needs_rate=True),
    "workers": Experiment("other numbers of workers", rates.measure_workers, 6.0),
}
"""Experiments by name, in the order of running."""


def measure_loaders(
    session: Session,
    *,
    budget_s: float,
    only: Iterable[str] = tuple(STEPS),
    on_progress: Callable[[str, float], object] = lambda *_: None,
) -> None:
    """Run the experiments on a session's training loaders one after the other, and add their results to the session.

    The user's loaders are restored after each experiment, and so are all global random generators. Each experiment
    builds its own loaders; the user's loaders are never iterated.

    Args:
        session: the session. Its ``train_loaders`` is a DataLoader, a dict or list of them, or a CombinedLoader. For
            any other iterable that can be iterated again, only the rate is measured.
        budget_s: seconds for all experiments. They may take longer if a single batch does.
        only: names of experiments. ``loader`` also runs if another experiment needs its result.
        on_progress: called with the name of the next experiment and the share of work done, 0 to 1.

    Raises:
        DatasetError: the loader as configured cannot load a sample. The message names sample and worker, if known.
        LoaderError: the loader hangs or is empty.
    """
    wanted = set(only)
    if any(STEPS[name].needs_rate for name in wanted):
        wanted.add("loader")
    names = [name for name in STEPS if name in wanted]
    deadline_s = session.clock() + budget_s
    no_loader = session.find_parts()
    for done, name in enumerate(names):
        on_progress(name, done / len(names))
        remaining_s = deadline_s - session.clock()
        weights = max(0.1, sum(STEPS[remaining].weight for remaining in names[done:]))
        session.share_s = max(_LEAST_S, remaining_s * STEPS[name].weight / weights)
        try:
            _check_possible(session, name, no_loader, late=remaining_s < _LEAST_S)
            STEPS[name].measure(session)
        except (NotMeasurable, FeedError) as reason:
            if name == "loader" and isinstance(reason, FeedError):
                raise
            session.leave_out(name, str(reason))


def _check_possible(session: Session, name: str, no_loader: str | None, *, late: bool) -> None:
    """Raise NotMeasurable if an experiment is impossible with this loader, or if no time is left for it."""
    if no_loader is not None and not STEPS[name].any_iterable:
        raise NotMeasurable(no_loader)
    if late and name not in ("loader", "keys"):
        raise NotMeasurable("no time was left for it")
    if STEPS[name].needs_rate and session.alone is None:
        raise NotMeasurable("it needs the rate of the loader alone, which was not measured")


# --- what is not run ----------------------------------------------------------------------------------------------


def _own_callbacks(trainer: AnyTrainer) -> list[Any]:
    """Return the callbacks of classes outside Lightning and this package that take part in training."""
    return [
        callback
        for callback in _host.callbacks_of(trainer)
        if not _host.defined_by_lightning(type(callback))
        and any(_host.is_overridden(callback, hook) for hook in CALLBACK_HOOKS)
    ]


def _left_out_of_the_fit(session: Session) -> str:
    """Return the names of the parts of a fit that a diagnosis does not run; empty if there are none."""
    trainer = session.trainer
    owners = (session.model, session.datamodule)
    has_data = session.datamodule is None or any(_host.is_overridden(owner, "val_dataloader") for owner in owners)
    names = []
    if has_data and trainer.limit_val_batches and _host.is_overridden(session.model, "validation_step"):
        names.append("validation")
    parts = (*trainer.checkpoint_callbacks, *trainer.loggers, *_own_callbacks(trainer))
    names += [type(part).__name__ for part in parts]
    if not names:
        return ""
    return (
        f"{', '.join(names)}: not run, since they may write files or upload. To measure them, use "
        "GPUStarvationCallback() in the fit itself"
    )
