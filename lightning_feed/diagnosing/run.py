"""diagnose: the choice, order and duration of experiments, and the verdict on their results."""

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from lightning_feed import _host
from lightning_feed._host import AnyDataModule, AnyModule, AnyTrainer
from lightning_feed.diagnosing import disk, functions, less_work, rates, samples
from lightning_feed.diagnosing.batches import FEWEST_CYCLES, Sample, own_loaders
from lightning_feed.diagnosing.failures import (
    DiagnosisFailed,
    DiagnosisInterrupted,
    DiagnosisNotWritten,
    in_a_line,
    user_errors,
)
from lightning_feed.diagnosing.session import NotMeasurable, Session, key_bytes, parts_of
from lightning_feed.diagnosing.short_fits import (
    AS_IT_IS,
    LATEST,
    DiagnosisSession,
    Limits,
    ModelState,
    open_session,
    quiet,
)
from lightning_feed.errors import FeedError, LoaderError, ReportError, SettingsError
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.machine import read_machine
from lightning_feed.measure.experiment_results import REST_OF_THE_FIT, ExperimentResults, KeyUse
from lightning_feed.measure.facts import with_loaders
from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.measure.stats import StarvationStats
from lightning_feed.report.document import make_report, read_document
from lightning_feed.report.files import check_writable, write_report
from lightning_feed.report.report import Report
from lightning_feed.verdict import decide as tree
from lightning_feed.verdict.diagnosis import Diagnosis

MODEL_EXPERIMENTS = {"model": "model_per_s", "host-batch": "host_batch_per_s"}
"""Replays of the same batches, on the device and from the host, with the fields for their rates."""
LOADER_EXPERIMENTS = {
    "loader": ("loader", "keys", "workers"),
    "cached-files": ("cached-files", "disk"),
    "transforms": ("transforms", "functions", "no-transforms", "uint8", "crops", "device-decode"),
    "cold-files": ("cold-files", "disk"),
    "constant-samples": ("constant-samples", "hand-over"),
    "copies": ("copies",),
}
"""The experiments with the loader alone, and the parts of each."""
EXPERIMENTS = (*MODEL_EXPERIMENTS, *LOADER_EXPERIMENTS)
"""Names that users can give. The older names ``X1`` to ``X8`` stand for these, in this order."""
BUDGET_S = 90.0
QUICK_BUDGET_S = 30.0
RUN_SHARE = 0.17
REPLAY_SHARE = 0.06
"""Shares of the budget for the unchanged run, and for each replay. The data experiments get the rest."""
RUN_STEPS = 200
REPLAY_STEPS = 300
QUICK_RUN_STEPS = 80
QUICK_REPLAY_STEPS = 80
REPLAYED = (8, 4, 2)
"""Numbers of batches to replay if their shapes differ. The largest for which there is time is taken."""
PASSES = 5
"""Fewest passes over the replayed batches: one is warm-up, and at least two have to follow."""
FEWEST_RUN_STEPS = 12
"""Fewest steps of the run: the first does not count, and a verdict needs ten."""
CALLBACK_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
"""Hooks of callbacks that are called in training."""
BAR = "{desc} {bar} {percentage:3.0f}%"


def diagnose(  # noqa: PLR0913  # one call that says what to train and how far to go; all but three by name
    trainer: AnyTrainer,
    model: AnyModule,
    datamodule: AnyDataModule = None,
    *,
    train_dataloaders: AnyLoader = None,
    quick: bool = False,
    only: Iterable[str] | None = None,
    out: str | Path | None = None,
    previous: Report | str | Path | None = None,
    budget_s: float | None = None,
    callbacks: bool = False,
) -> Diagnosis:
    """Find what limits training by experiments.

    Trains for some seconds on one device: first with the loaders unchanged, then with the same batches repeated (on the
    device, then from the host). Loggers, checkpoints, validation, callbacks other than PrefetchCallback, and the
    module's hooks for the end of a training do not run; the report names them. Then measures the training loader alone,
    with parts of its work left out.

    Afterwards these are restored: the ``state_dict`` of the module, of optimizers and schedulers in its attributes, and
    of callbacks that ran; ``requires_grad``, ``train()`` and ``eval()``; the random states of torch, numpy and Python;
    attributes of the data module and its data sets; your own loaders. Gradients are dropped. Other changes that your
    code makes in a training step remain. To avoid them, use the command ``lightning-feed diagnose``, which runs in a
    separate process.

    Args:
        trainer: the Trainer to copy settings from. None: a Trainer for the device that Lightning chooses.
        model: the module. None: only the loader is measured.
        datamodule: the data module, unless ``train_dataloaders`` or the module gives the training loader.
        train_dataloaders: as for ``Trainer.fit``.
        quick: a third of the time.
        only: experiments to run, such as "model" and "loader"; None: all. With a module, the unchanged run always comes
            first.
        out: folder for ``feed_report.json``, ``.md`` and ``.html``; None: nothing is written.
        previous: the report of an earlier run, or its path. Its predictions for remedies that you have applied are
            compared with this run, in the ``report_card`` of the files.
        budget_s: approximate total seconds; None: 90, or 30 with ``quick``.
        callbacks: also run the Trainer's callbacks of your own classes in the first fit, even if they write or upload,
            but not their hooks for the end of a training.

    Raises:
        SettingsError: when there is nothing to load from, or the Trainer cannot be used.
        ReportError: when ``out`` cannot be written to, or ``previous`` cannot be read; nothing was run.
        FeedError: when the unchanged run fails; the cause is attached.
        DiagnosisFailed: when your code fails later, with the results so far.
        DiagnosisNotWritten: when the files cannot be written at the end, with the verdict.
        DiagnosisInterrupted: on Ctrl-C and SIGTERM, with the results so far.
    """
    asked = _check_only(only)
    limit_s = (QUICK_BUDGET_S if quick else BUDGET_S) if budget_s is None else budget_s
    if limit_s <= 0:
        raise SettingsError(f"budget_s={budget_s!r}: give the seconds that the experiments may take, more than 0.")
    earlier = read_document(previous) if isinstance(previous, (str, Path)) else previous
    if out is not None:
        check_writable(Path(out))  # do not lose a minute of experiments at the end
    session = _open(trainer, model, datamodule, train_dataloaders, callbacks=callbacks)
    experiments = _Experiments(session, asked, limit_s, quick=quick)
    failure = _run(experiments)
    diagnosis = tree.diagnose(experiments.measurements())
    written, problem = _write(diagnosis, earlier, out)
    if session.stops.number is not None:
        stop = DiagnosisInterrupted("diagnose() was interrupted", diagnosis, written)
        stop.signal_number = session.stops.number
        stop.not_written = str(problem or "")
        raise stop
    if failure is not None:
        raise DiagnosisFailed(str(failure), diagnosis, written) from (failure.__cause__ or failure)
    if problem is not None:
        raise DiagnosisNotWritten(str(problem), diagnosis, written) from problem
    return diagnosis


def _write(
    diagnosis: Diagnosis, previous: Report | None, out: str | Path | None
) -> tuple[list[Path], ReportError | None]:
    """Write the files; return them, or the error: a full disk must not cost the verdict."""
    if out is None:
        return [], None
    try:
        return write_report(make_report(diagnosis, previous=previous), out), None
    except ReportError as error:
        return [], error


def _check_only(only: Iterable[str] | None) -> tuple[str, ...]:
    if only is None:
        return EXPERIMENTS
    numbered = {f"x{number}": name for number, name in enumerate(EXPERIMENTS, start=1)}
    given = (name.strip().lower() for name in (only.split(",") if isinstance(only, str) else only))
    asked = tuple(numbered.get(name, name) for name in given)
    unknown = [name for name in asked if name not in EXPERIMENTS]
    if unknown or not asked:
        raise SettingsError(
            f"only={','.join(asked)!r}: {unknown[0] if unknown else 'an empty list'} is not an experiment. Give any of "
            f"{', '.join(EXPERIMENTS)}."
        )
    return asked


def _open(trainer: object, model: object, datamodule: object, loaders: object, *, callbacks: bool) -> DiagnosisSession:
    if datamodule is not None and loaders is not None:
        raise SettingsError("Give diagnose() a datamodule or train_dataloaders, not both, as for Trainer.fit.")
    if datamodule is None and loaders is None:
        datamodule = getattr(trainer, "datamodule", None)
    if datamodule is None and loaders is None and not _host.is_overridden(model, "train_dataloader"):
        raise SettingsError(
            "diagnose() found no training loader. Give it a datamodule, or train_dataloaders=, or a module with a "
            "train_dataloader() of its own."
        )
    session = open_session(trainer, model, datamodule, loaders)
    session.callbacks = _own_callbacks(session.trainer) if callbacks else []
    return session


def _run(experiments: "_Experiments") -> FeedError | None:
    """Run the experiments, restore what they changed, and return the failure that ended them. Signals are noted.

    Raises:
        FeedError: a failure before anything was measured.
    """
    stops = experiments.session.stops
    try:
        bar = tqdm(total=100, desc="diagnose", disable=None, leave=False, bar_format=BAR)
        with bar, quiet(), experiments.session.restoring() as state:
            experiments.run(state, bar)
    except KeyboardInterrupt:
        stops.note(signal.SIGINT)
    except Exception as error:
        # Ctrl-C also reaches the workers, which makes the loader fail.
        if stops.number is None:
            if not isinstance(error, FeedError) or not experiments.found_anything():
                raise
            return error
    return None


class _Experiments:
    """The experiments of one diagnosis, and their results so far.

    Ctrl-C is raised at once. If Python dropped it, it is raised after the current step of a fit or experiment.
    """

    def __init__(self, session: DiagnosisSession, asked: tuple[str, ...], budget_s: float, *, quick: bool) -> None:
        self.session = session
        self._bar: Any = None
        self._asked = asked
        self._budget_s = budget_s
        self._quick = quick
        self._results = ExperimentResults()
        self._rates: dict[str, Any] = {}
        """Rates of the replays, by field of the results."""
        self._left_out: dict[str, str] = {}

    def found_anything(self) -> bool:
        """True if an experiment, or the unchanged run, has a result."""
        measured = self.session.measured
        found = self._results != ExperimentResults() or any(self._rates.values())
        return found or (measured is not None and measured.stats.step_ms is not None)

    def measurements(self) -> Measurements:
        """All measurements so far, for the verdict."""
        session = self.session
        results = self._results
        measured = session.measured
        if measured is None:
            loaders: list[AnyLoader] = []
            with suppress(LoaderError):  # not a DataLoader: no facts are known
                loaders = [part.loader for part in parts_of(session.train_loaders)]
            facts = LoopFacts(device_type=session.device.type, usable_cpus=read_machine().usable_cpus)
            none = StarvationStats(steps=0, confidence="low")
            measured = Measurements(stats=none, facts=with_loaders(facts, loaders))
        first = session.host_batches.first
        sizes = {key.name: key.bytes_per_batch for key in results.keys} or ({} if first is None else key_bytes(first))
        results = replace(
            results,
            **self._rates,
            batch_size=results.batch_size or measured.facts.batch_size,
            keys=tuple(
                KeyUse(name=name, bytes_per_batch=size, used=session.uses.get(name)) for name, size in sizes.items()
            ),
            left_out=tuple(sorted((*results.left_out, *self._left_out.items()))),
        )
        return replace(measured, experiments=results)

    def run(self, state: ModelState, bar: object) -> None:
        """Run all experiments.

        Args:
            state: the module's state at the beginning of each replay.
            bar: a tqdm bar of 100 steps.

        Raises:
            FeedError: when the unchanged run fails.
        """
        session = self.session
        self._bar = bar
        if session.model is None:
            self._left_out.update({name: "no module was given" for name in MODEL_EXPERIMENTS if name in self._asked})
            with user_errors("the data module could not be set up"):
                session.set_up()
        else:
            self._run_as_it_is()
            # Each replay begins with the weights from before the run: a long fit of one batch moves them far away.
            for name, sample in (("model", session.device_batches), ("host-batch", session.host_batches)):
                session.stops.check()
                if name in self._asked:
                    state.restore()
                    self._replay(name, sample)
            state.restore()
        self._measure_loader()
        try:
            session.tear_down()
        except Exception as error:  # noqa: BLE001  # what was measured is worth more
            self._left_out["teardown"] = f"the data module's failed: {in_a_line(error)}"
        session.stops.check()
        self._bar.update(self._bar.total - self._bar.n)

    def _run_as_it_is(self) -> None:
        session = self.session
        steps = QUICK_RUN_STEPS if self._quick else RUN_STEPS
        limits = Limits(least=FEWEST_RUN_STEPS, most=steps, seconds=RUN_SHARE * self._budget_s)
        self._show("the run as it is", 0.0)
        with user_errors(AS_IT_IS):
            session.run_as_it_is(limits)
        beside = _left_out_of_the_fit(session)
        if beside:
            self._left_out[REST_OF_THE_FIT] = beside
        if session.trainer.num_devices * session.trainer.num_nodes > 1:
            self._left_out["ranks"] = (
                "trained on one device; to compare ranks, use GPUStarvationCallback() in the run itself"
            )

    def _replay(self, name: str, sample: Sample) -> None:
        session = self.session
        on_device = name == "model"
        if sample.first is None:
            self._left_out[name] = (
                "training_step takes dataloader_iter, and fetches for itself"
                if _host.takes_iterator(session.model)
                else "the run as it is gave no batch"
            )
            return
        batches, limits = self._batches_and_limits(sample)
        many = "batch" if len(batches) == 1 else "batches"
        where = "on the device" if on_device else "from the host"
        self._show(f"{name}: the same {many} {where} again and again", RUN_SHARE + (0 if on_device else REPLAY_SHARE))
        try:
            per_s = session.replay(batches, limits, on_device=on_device)
        except Exception as error:  # noqa: BLE001  # the other experiments do not need this one
            session.stops.check()  # Ctrl-C also reaches the workers, and makes them fail
            self._left_out[name] = f"it failed: {in_a_line(error)}"
            return
        self._rates[MODEL_EXPERIMENTS[name]] = per_s
        if per_s is None:
            self._left_out[name] = "too few steps in the available time: allow more, or leave --quick out"

    def _batches_and_limits(self, sample: Sample) -> tuple[list[Batch], Limits]:
        """The batches of the run to replay, as many as the time allows, and the length of the fit."""
        session = self.session
        seconds = REPLAY_SHARE * self._budget_s
        accumulate = session.trainer.accumulate_grad_batches
        most = (QUICK_REPLAY_STEPS if self._quick else REPLAY_STEPS) * accumulate
        step_ms = session.measured.stats.step_ms if session.measured is not None else None
        for count in REPLAYED:
            least = PASSES * math.lcm(accumulate, count)
            if step_ms is not None and least <= most and least * step_ms * 1e-3 <= LATEST * seconds:
                batches = sample.take(count)
                if len(batches) > 1:
                    return batches, Limits(least=least, most=most, seconds=seconds)
                break
        least = (FEWEST_CYCLES * 4 // 3 + 4) * accumulate
        return sample.take(1), Limits(least=least, most=most, seconds=seconds)

    def _measure_loader(self) -> None:
        session = self.session
        wanted = [name for name in LOADER_EXPERIMENTS if name in self._asked]
        if not wanted:
            return
        spent = 0.0 if session.model is None else RUN_SHARE + 2 * REPLAY_SHARE
        begun: list[str] = []

        def on_progress(name: str, share: float) -> None:
            session.stops.check()
            begun.append(name)
            what = f"{name}: {DATA_EXPERIMENTS[name].what}" if name else name
            self._show(what, spent + (1 - spent) * share)

        try:
            for results in run_data_experiments(
                own_loaders(session.train_loaders),
                device=session.device,
                budget_s=(1 - spent) * self._budget_s,
                only=frozenset(part for name in wanted for part in LOADER_EXPERIMENTS[name]),
                on_progress=on_progress,
            ):
                self._results = results
        except FeedError as error:
            if session.measured is None:
                raise
            unmade = [name for name in wanted if name not in begun[:-1]]
            self._left_out.update(dict.fromkeys(unmade, str(error)))

    def _show(self, words: str, share: float) -> None:
        """Show the present experiment, and the share of time used, on the bar."""
        self._bar.set_description_str(words)
        self._bar.update(100 * share - self._bar.n)


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
    """Weight for its share of the time."""


DATA_EXPERIMENTS = {
    "loader": Experiment("the loader alone, as configured", rates.measure_loader, 4.0),
    "keys": Experiment("bytes of each part of a batch", rates.measure_keys, 0.0),
    "functions": Experiment("your functions, by time", functions.measure_functions, 0.7),
    "disk": Experiment("the files that samples are made of", disk.measure_disk, 0.5),
    "constant-samples": Experiment("constant samples, same workers", rates.measure_ceiling, 1.6),
    "hand-over": Experiment("a ready batch, from worker to training", rates.measure_hand_over, 0.4),
    "transforms": Experiment("reading, decoding and each transform", samples.measure_costs, 1.3),
    "no-transforms": Experiment("transforms left out", less_work.measure_without_transforms, 1.0),
    "uint8": Experiment("pixel work left to the device", less_work.measure_as_uint8, 1.0),
    "crops": Experiment("only the crops decoded", less_work.measure_crops, 1.0),
    "device-decode": Experiment("decoding on the device", rates.measure_device_decode, 0.7),
    "cached-files": Experiment("files in the page cache", disk.measure_cached, 3.0),
    "cold-files": Experiment("files out of the page cache", disk.measure_cold, 3.0),
    "workers": Experiment("other numbers of workers", rates.measure_scaling, 4.0),
    "copies": Experiment("copies to the device", rates.measure_copies, 0.5),
}
"""Experiments by name, in the order of running."""
_BUILD_ON_LOADER = {"keys", "disk", "cached-files", "cold-files", "workers", "copies"}
"""Experiments that need the result of ``loader``."""
_OF_ANY_ITERABLE = {"loader", "keys", "copies"}
"""Experiments that do not need a DataLoader."""


def run_data_experiments(
    loader: object,
    *,
    device: Any = None,
    budget_s: float,
    only: frozenset[str] = frozenset(DATA_EXPERIMENTS),
    on_progress: Callable[[str, float], object] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ExperimentResults]:
    """Run the experiments one after the other, and yield all results so far after each.

    The user's loaders, data sets, samplers and all random generators are restored after each ``next()``, even if it
    raises; results yielded before a KeyboardInterrupt remain valid. Each experiment builds its own loaders; the user's
    are never iterated.

    Args:
        loader: the result of ``train_dataloader``: a DataLoader, a dict or list of them, or a CombinedLoader. For any
            other iterable that can be iterated again, only the rate is measured.
        device: device that batches go to; None: none.
        budget_s: seconds for all experiments. They may take longer if a single batch does.
        only: names of experiments. ``loader`` also runs if one of them needs its result.
        on_progress: called with the name of the next experiment and the share of work done, 0 to 1.
        clock: seconds.

    Raises:
        DatasetError: the loader as configured cannot load a sample; the message names sample and worker, if known.
        LoaderError: the loader hangs or is empty.
    """
    names = [name for name in DATA_EXPERIMENTS if name in only]
    if _BUILD_ON_LOADER.intersection(names) and "loader" not in names:
        names.insert(0, "loader")
    session = Session(loader, None if device is None else torch.device(device), clock)
    deadline = clock() + budget_s
    no_loader = session.prepare()
    for done, name in enumerate(names):
        on_progress(name, done / len(names))
        left_s = deadline - clock()
        weights = max(0.1, sum(DATA_EXPERIMENTS[other].weight for other in names[done:]))
        session.share_s = max(_LEAST_S, left_s * DATA_EXPERIMENTS[name].weight / weights)
        try:
            _check_possible(session, name, no_loader, late=left_s < _LEAST_S)
            DATA_EXPERIMENTS[name].measure(session)
        except (NotMeasurable, FeedError) as reason:
            if name == "loader" and isinstance(reason, FeedError):
                raise
            session.note(left_out=(*session.results.left_out, (name, str(reason))))
        yield session.results
    on_progress("", 1.0)


def _check_possible(session: Session, name: str, no_loader: str | None, *, late: bool) -> None:
    """Raise NotMeasurable for an experiment that is impossible with this loader, or comes too late."""
    if no_loader is not None and name not in _OF_ANY_ITERABLE:
        raise NotMeasurable(no_loader)
    if late and name not in ("loader", "keys"):
        raise NotMeasurable("no time was left for it")
    if name in _BUILD_ON_LOADER and session.alone is None:
        raise NotMeasurable("it needs the rate of the loader alone, which was not measured")


# --- what is not run ----------------------------------------------------------------------------------------------


def _own_callbacks(trainer: AnyTrainer) -> list[Any]:
    """The callbacks of the user's own classes that take part in training."""
    return [
        one
        for one in trainer.callbacks
        if not _host.defined_by_lightning(type(one)) and any(_host.is_overridden(one, hook) for hook in CALLBACK_HOOKS)
    ]


def _left_out_of_the_fit(session: DiagnosisSession) -> str:
    """The names of the parts of a fit that a diagnosis does not run; empty if there are none."""
    trainer = session.trainer
    model = session.model
    data = session.datamodule
    has_data = data is None or any(_host.is_overridden(one, "val_dataloader") for one in (model, data))
    validates = has_data and trainer.limit_val_batches and _host.is_overridden(model, "validation_step")
    run = set(map(id, session.callbacks))
    callbacks = [one for one in _own_callbacks(trainer) if id(one) not in run]
    names = ["validation"] if validates else []
    names += [type(one).__name__ for one in (*trainer.checkpoint_callbacks, *trainer.loggers, *callbacks)]
    if not names:
        return ""
    more = "; --callbacks, or callbacks=True, runs the callbacks here" if callbacks else ""
    return (
        f"{', '.join(names)}: not run, since they may write files or upload. To measure them, use "
        f"GPUStarvationCallback() in the fit itself{more}"
    )
