"""GPUStarvationCallback: the time that each step spends waiting for data, copying, and computing."""

import io
import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original, Stage
from lightning_feed.callbacks.starvation_run import StarvationRun
from lightning_feed.errors import SettingsError
from lightning_feed.load.settings import Recommendation
from lightning_feed.measure import loop
from lightning_feed.measure.guard import Guard, Once, check_instance, guarded
from lightning_feed.measure.loop import Schedule
from lightning_feed.measure.measurements import Measurements
from lightning_feed.measure.nvml import NvmlSampler
from lightning_feed.measure.stats import SOME_STEPS, StarvationStats, Which, choose_tags, custom_scalar_layout, to_tags
from lightning_feed.measure.wall import WallClock
from lightning_feed.report.document import as_json, make_report
from lightning_feed.report.files import Form, as_html, short_markdown, show_report, write_report
from lightning_feed.report.next_step import ENOUGH_STEPS, next_step
from lightning_feed.report.report import Report, RunIdentity, headline, read_identity
from lightning_feed.verdict.decide import diagnose
from lightning_feed.verdict.diagnosis import Diagnosis

logger = logging.getLogger(__name__)
FOLDER_VARIABLE = "LIGHTNING_FEED_DIR"
IN_ROOT = "feed_reports"
"""The folder of reports in the Trainer's ``default_root_dir``."""
_shown_fits: set[str] = set()
"""Runs whose reports this process has shown: reports of later fits are one line."""
_NOTHING = Measurements(stats=StarvationStats(steps=0, confidence="low"))


class GPUStarvationCallback(Callback):
    """Measures how each training step divides into waiting for data, copying, computing and the rest.

    Measuring never synchronises: with CUDA and XPU the parts are times between events on the compute stream, read some
    steps later. The wait for data is measured in every step there, the other parts in one of eight. On the CPU they are
    the host's times. Other devices are timed on the host as well, but with low confidence and one INFO line, because
    the host does not see the work queued there. The figures go to every logger of the Trainer, to the progress bar
    (``feed``: share of the step spent waiting for data), and into a report on the console. If the callback itself
    fails, one warning says so, and training goes on.

    Args:
        every_n_steps: steps between two logs, each over these steps; None: the Trainer's ``log_every_n_steps``.
        nvml: also read the GPU's utilisation, memory, power and PCIe traffic, once a second.
        report: print the report after 200 steps or a minute, at the end of the fit, and when Ctrl-C, SIGTERM or an
            error ends it; in endless streams every 10 minutes. Later reports print only the verdict and the next step
            if these are unchanged. Fits of fewer than 30 steps, and every fit after the first of a process, print one
            line. Each report is written to ``feed_report.html``, ``.json`` and ``.md``; loggers get it, too, but not
            after Ctrl-C, SIGTERM or an error.
        tags: ``"core"`` logs the speed of training and what it waits for; ``"all"`` adds figures that help to find the
            cause.
        folder: folder for these files. None: the folder named by the environment variable ``LIGHTNING_FEED_DIR``, the
            first logger's folder on this machine, or the folder of the checkpoints; else ``feed_reports`` in the
            Trainer's ``default_root_dir``. Reports of other runs are kept: the next one is ``feed_report-2.html``.

    Raises:
        SettingsError: when ``every_n_steps`` is not a positive integer, ``tags`` is unknown, or the folder is on
            another machine.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_feed import GPUStarvationCallback
        >>> starvation = GPUStarvationCallback(every_n_steps=20)
        >>> trainer = Trainer(callbacks=[starvation], logger=False, accelerator="cpu")
        >>> starvation.report().bottleneck
        'unknown'
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        nvml: bool = True,  # noqa: FBT001, FBT002  # the promised signature
        report: bool = True,  # noqa: FBT001, FBT002  # as above
        *,
        tags: Which = "core",
        folder: str | Path | None = None,
    ) -> None:
        whole = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if every_n_steps is not None and (not whole or every_n_steps < 1):
            raise SettingsError(
                f"GPUStarvationCallback(every_n_steps={every_n_steps!r}): give the number of steps between two logged "
                "windows, a whole number of 1 or more, or leave it out to log when the Trainer logs."
            )
        if tags not in get_args(Which):
            raise SettingsError(f'GPUStarvationCallback(tags={tags!r}): give "core" or "all".')
        chosen = folder or os.environ.get(FOLDER_VARIABLE) or None
        self._folder = _path(chosen)
        if self._folder is None and chosen is not None:
            given = f"folder={folder!r}" if folder else f"{FOLDER_VARIABLE}={chosen}"
            raise SettingsError(f"GPUStarvationCallback: {given} is not on this machine. Give a local folder.")
        self.every_n_steps = every_n_steps
        self.tags = tags
        self.nvml = nvml
        self.any_logger = True
        """True if loggers from other packages than Lightning receive figures and reports, too."""
        self.print_report = report
        self._run: StarvationRun | None = None
        self._wall = WallClock()
        self._measured: dict[Stage, Measurements] = {}
        self._last: StarvationStats | None = None
        self._schedule = Schedule()
        self._reported_steps = 0
        self._identity = RunIdentity()
        self._shown: Diagnosis | None = None
        self._paces: dict[int, Pace] = {}
        self._laid_out: weakref.WeakSet[Any] | None = None
        self._once = Once(logger)
        self._guard = self._new_guard()

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners. A running fit can be neither.
        run = self._run
        now = self._guard.attempt("sum up its figures", run.measurements) if run is not None else None
        return {
            **self.__dict__,
            "_run": None,
            "_measured": {**self._measured, **({run.stage: now} if run is not None and now is not None else {})},
            "_last": self.summary(),
            "_laid_out": None,
        }

    def summary(self) -> StarvationStats | None:
        """The figures logged last, in this fit or the one before; None before the first log."""
        return self._run.last if self._run is not None and self._run.stage == "fit" else self._last

    def report(self, stage: Stage = "fit") -> Diagnosis:
        """The verdict on what limits training, from all steps measured in this fit or the last one.

        Args:
            stage: ``"validate"``, ``"test"`` or ``"predict"`` for the last run of that method of the Trainer.
        """
        run = self._run
        if run is not None and run.stage == stage:
            return diagnose(run.measurements())
        return diagnose(self._measured.get(stage, _NOTHING))

    @property
    def measured_fit(self) -> StarvationRun | None:
        """The fit being measured."""
        return self._run if self._run is not None and self._run.stage == "fit" else None

    # --- begin and end ------------------------------------------------------------------------------------------------

    log = _host.RunBegins("_run_begins")

    def _run_begins(self) -> None:
        self._guard = self._new_guard()
        self._wall = self._guard.measure(WallClock) or self._wall

    @guarded
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring the sanity check separately."""
        self._wall.enter("sanity check")

    @guarded
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the time from here on as set-up."""
        self._wall.leave()

    @guarded
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring a fit, test or prediction, unless another instance already does."""
        self._begin(trainer, _host.stage_now(trainer))

    on_test_start = on_predict_start = on_train_start

    def _new_guard(self) -> Guard:
        return Guard("GPUStarvationCallback", self._let_go)

    def _begin(self, trainer: AnyTrainer, stage: Stage) -> None:
        self._let_go()
        if next(one for one in trainer.callbacks if isinstance(one, GPUStarvationCallback)) is not self:
            self._once.say(
                trainer, logging.WARNING, "A second GPUStarvationCallback does nothing: one measures already."
            )
            return
        every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps
        self._measured.pop(stage, None)
        self._last = None if stage == "fit" else self._last
        self._schedule = Schedule()
        self._reported_steps = 0
        self._identity = read_identity()
        self._shown = None
        run = self._run = StarvationRun(trainer, every=every, guard=self._guard, wall=self._wall, stage=stage)
        device = trainer.strategy.root_device
        if not run.sees_device:
            self._once.say(
                trainer,
                logging.INFO,
                f"GPUStarvationCallback: device '{device}' has no timing events. Times are measured on the host, which "
                "does not see queued work, so confidence is low.",
            )
        run.nvml = self._guard.attempt("read the GPU's figures", self._start_nvml, trainer, device)
        if trainer.progress_bar_callback is not None:
            self._guard.attempt("show its figure in the progress bar", self._join_bar, trainer.progress_bar_callback)
        if trainer.is_global_zero:
            self._paces.clear()
            self._for_each_logger(trainer, "lay its figures out in", self._lay_out)
            self._for_each_logger(trainer, "time the calls of", run.time_logger)
        if not trainer.loggers and stage == "fit":
            self._once.say(
                trainer,
                logging.WARNING,
                "GPUStarvationCallback: the Trainer has no logger, so nothing is logged. summary() and report() "
                "have the measurements.",
            )

    @guarded
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch, whose first batch is measured separately."""
        if self._run is not None:
            self._run.epoch_began()

    @guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the training step that contains this validation, and measure the validation separately."""
        if self._run is not None:
            self._run.validation_began()
        elif trainer.state.fn == "validate":
            self._begin(trainer, "validate")

    @guarded
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the time of the validation, test or prediction; report if it is not part of a fit."""
        run = self._run
        if run is None:
            return
        if run.stage != "fit":
            run.end()
        tags = run.loop_tags()
        step = _host.steps_logged(trainer)
        if tags and trainer.is_global_zero:
            self._log(trainer, tags, step)
        if run.stage != "fit":
            self._publish(trainer, run, ended=True, to_loggers=False)
            self._let_go()

    on_test_end = on_predict_end = on_validation_end

    @guarded
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the times of the last steps from the device, and report."""
        run = self._run
        if run is None:
            return
        run.end()
        self._publish(trainer, run, ended=True)
        self._let_go()

    def on_exception(self, trainer: Trainer, *args: object) -> None:
        """Report, and remove everything from the Trainer: Lightning does not call ``teardown`` after an exception.

        Also called on Ctrl-C and SIGTERM. Nothing here waits for the device, other ranks, or a logger's server.
        """
        check_instance(self, GPUStarvationCallback)
        self._guard.measure(self._interrupted, trainer)

    def _interrupted(self, trainer: AnyTrainer) -> None:
        if self._run is not None and self._run.finished != self._reported_steps:
            self._publish(trainer, self._run, ended=True, to_loggers=False)
        self._let_go()

    @guarded
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove everything from the Trainer."""
        self._let_go()

    def _let_go(self) -> None:
        run = self._run
        self._run = None
        if run is None:
            return
        self._last = run.last if run.stage == "fit" else self._last
        found = self._guard.attempt("sum up its figures", run.measurements)
        if found is not None:
            self._measured[run.stage] = found
        run.close()

    # --- windows ------------------------------------------------------------------------------------------------------

    @guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Note the parts of the first batch."""
        if self._run is not None:
            self._run.batch_came(batch)

    @guarded
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note the loader of each batch, and the parts of the first batch."""
        if self._run is not None:
            self._run.batch_came(batch, dataloader_idx)
            self._run.step_ended()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @guarded
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Close a window and log it at the steps at which the Trainer logs."""
        run = self._run
        if run is None:
            return
        if run.every:
            step = _host.step_to_log(trainer, run.every)
            if step is not None and step != run.logged_step:
                run.logged_step = step
                self._log_window(trainer, run, step)
        run.step_ended()
        if self.print_report and trainer.is_global_zero and self._schedule.due(run.finished):
            run.leave_out_step()  # a step that includes a report does not count
            self._publish(trainer, run)

    def _log_window(self, trainer: Trainer, run: StarvationRun, step: int) -> None:
        tags = run.close_window()
        if not trainer.is_global_zero:
            return
        began = loop.clock()
        self._log(trainer, tags, step)
        if loop.clock() - began >= SLOW_S:
            run.leave_out_step()  # a step that includes our slow call does not count

    def _log(self, trainer: object, tags: dict[str, float], step: int) -> None:
        chosen = choose_tags(tags, self.tags)
        self._for_each_logger(
            trainer, "log its figures to", lambda to: self._paces.setdefault(id(to), Pace()).give(to, chosen, step)
        )

    def _for_each_logger(self, trainer: AnyTrainer, task: str, give: Callable[[Any], object]) -> None:
        """Call each logger in turn: a failing logger does not affect the others."""
        for number, each in enumerate(trainer.loggers):
            if self.any_logger or _of_lightning(each):
                self._guard.attempt(f"{task} {type(each).__name__} (trainer.loggers[{number}])", give, each)

    # --- what users see -----------------------------------------------------------------------------------------------

    def _publish(
        self, trainer: AnyTrainer, run: StarvationRun, *, ended: bool = False, to_loggers: bool = True
    ) -> None:
        """Write the report into the run's folder, show it, and pass it to the loggers."""
        if not self.print_report or not trainer.is_global_zero:
            return
        if run.finished == self._reported_steps and not ended:  # the end of a run adds its validation and its wall time
            return
        self._reported_steps = run.finished
        found = self._guard.attempt("make its report", lambda: self.report(run.stage))
        # Nobody expects a verdict from a fit with so few steps.
        silent = found is None or (found.grade == "not measured" and run.finished < SOME_STEPS)
        first = self._schedule.first
        self._schedule.came(early=silent)
        if found is None or silent:
            return
        report = make_report(found, run=self._identity_in(trainer))
        written = self._guard.attempt("write its report", _write, trainer, report, self._folder) or ()
        form = self._form(trainer, run, report, ended=ended, first=first)
        if form is not None:
            printer = _host.bar_printer(trainer)
            show = partial(show_report, form=form, before=self._shown)
            self._guard.attempt("print its report", show, report, printer, written)
            self._shown = found
        if to_loggers:
            self._give_to_loggers(trainer, report, ended=ended)

    def _identity_in(self, trainer: AnyTrainer) -> RunIdentity:
        folder = run_folder(trainer, self._folder)
        name = "" if folder is None or folder == _fallback(trainer) else folder.name
        return replace(self._identity, folder=name)

    def _form(
        self, trainer: AnyTrainer, run: StarvationRun, report: Report, *, ended: bool, first: bool
    ) -> Form | None:
        """The form in which to show the report now; None if it is only written to files."""
        endless = trainer.num_training_batches == math.inf
        if run.stage == "fit" and ((_shown_fits - {self._identity.id}) or (ended and run.finished < ENOUGH_STEPS)):
            return "line" if ended or endless else None
        if not (ended or first or endless):
            return None
        if run.stage == "fit":
            _shown_fits.add(self._identity.id)
        found = report.diagnosis
        same = self._shown is not None and _told(self._shown) == _told(found)
        return "short" if same else "full"

    def _give_to_loggers(self, trainer: AnyTrainer, report: Report, *, ended: bool) -> None:
        params = self._guard.attempt("read the loader's settings", tuned_hparams, trainer.datamodule)
        if params and ended:
            self._for_each_logger(
                trainer,
                "pass the loader's settings to",
                lambda one: log_hparams(one, params, achieved(report.diagnosis)),
            )
        step = trainer.global_step
        self._for_each_logger(trainer, "give its report to", lambda one: give_report(one, report, step))

    def _join_bar(self, bar: object) -> None:
        wrap = _host.Wrap(bar, "get_metrics", self._add_to_bar)
        if self._run is not None:
            self._run.also_undo(wrap.undo)

    def _add_to_bar(self, original: Original, *args: object, **kwargs: Any) -> Any:
        items = original(*args, **kwargs)
        ours = self._guard.attempt("show its figure in the progress bar", self._bar_item)
        return {**items, **ours} if ours else items

    def _bar_item(self) -> dict[str, str]:
        last = self.summary()
        return {} if last is None or last.starved_pct is None else {"feed": f"{last.starved_pct:.0f}%"}

    def _lay_out(self, to: object) -> None:
        """Tell TensorBoard how to draw the tags, once for each of its writers."""
        if self._laid_out is None:
            self._laid_out = weakref.WeakSet()
        experiment: Any = getattr(to, "experiment", None)
        if callable(getattr(experiment, "add_custom_scalars", None)) and experiment not in self._laid_out:
            self._laid_out.add(experiment)
            experiment.add_custom_scalars(custom_scalar_layout(self.tags))

    def _start_nvml(self, trainer: Trainer, device: torch.device) -> NvmlSampler | None:
        if not self.nvml or not trainer.is_global_zero:
            return None
        if device.type == "cpu":
            return None
        if device.type != "cuda" or torch.version.hip is not None:
            self._once.say(trainer, logging.INFO, f"No GPU figures from NVML: training runs on {device.type}.")
            return None
        sampler = NvmlSampler(str(torch.cuda.get_device_properties(device).uuid))
        sampler.start()
        return sampler


def _told(found: Diagnosis) -> tuple[str, ...]:
    """The verdict and the next step of a report; one with the same is shown in short."""
    return found.bottleneck, found.cause, found.grade, next_step(found)


def _write(trainer: AnyTrainer, report: Report, chosen: Path | None) -> list[Path]:
    folder = run_folder(trainer, chosen)
    stage = report.diagnosis.measurements.facts.stage
    if folder is None:
        return []
    return write_report(report, folder if stage == "fit" else folder / stage)


# --- what loggers get ------------------------------------------------------------------------------------------------

TEXT_TAG = "feed/report"
SLOW_S = 1e-3
"""Seconds above which a logger's call is slow."""


class Pace:
    """Passes figures to one logger; to a slow logger so rarely that it costs 1 % of the time."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=3)
        self._next_s = -math.inf

    def give(self, to: Any, tags: dict[str, float], step: int) -> None:
        """Log the figures, or skip this window."""
        began = loop.clock()
        if not tags or began < self._next_s:
            return
        to.log_metrics(tags, step=step)
        self._took.append(loop.clock() - began)
        least = min(self._took)  # one slow call may have other reasons
        if len(self._took) == self._took.maxlen and least >= SLOW_S:
            self._next_s = loop.clock() + 100 * least


def run_folder(trainer: AnyTrainer, chosen: Path | None = None) -> Path | None:
    """Folder for this run's reports; None if there is none, as in a ``fast_dev_run``.

    The chosen folder, else the first logger's folder on this machine, else the folder of the checkpoints, else one in
    ``default_root_dir``. Not ``trainer.log_dir``, which broadcasts, so that all ranks would have to call it. For a
    logger with an empty ``log_dir``, the folder is in its ``save_dir``; empty does not mean the current folder.
    """
    if trainer.fast_dev_run:
        return None
    if chosen is not None:
        return chosen
    for one in trainer.loggers:
        found = _folder_of(one)
        if found is not None:
            return found
    beside = getattr(trainer.checkpoint_callback, "dirpath", None) if trainer.loggers else None
    return _path(beside or None) or _fallback(trainer)


def _folder_of(logger: Any) -> Path | None:
    found = _path(getattr(logger, "log_dir", None) or None)
    if found is not None:
        return found
    saved = _path(getattr(logger, "save_dir", None))
    if saved is None:
        return None
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return saved / str(logger.name) / version  # where ModelCheckpoint puts its checkpoints


def _fallback(trainer: AnyTrainer) -> Path | None:
    root = _path(trainer.default_root_dir)
    return None if root is None else root / IN_ROOT


def _of_lightning(logger: object) -> bool:
    """True for Lightning's own loggers and their subclasses. Other packages' loggers share only the base class."""
    kinds = [one for one in type(logger).__mro__ if one.__module__.partition(".")[0] in _host.PACKAGES]
    return any(one.__name__ != "Logger" for one in kinds)


def _path(folder: object) -> Path | None:
    """A folder as a path; None also for a URL (``s3://bucket/runs``), which would become a local folder."""
    if not isinstance(folder, (str, PurePath)) or "://" in str(folder):
        return None
    return Path(folder)


def achieved(found: Diagnosis) -> dict[str, float]:
    """Measured results of a run, to compare settings in a table of runs."""
    stats = found.stats
    size = found.measurements.facts.loader.batch_size
    figures = {
        "feed_final/starved_pct": stats.starved_pct,
        "feed_final/samples_per_s": 1e3 * size / stats.step_ms if stats.step_ms and size else None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def give_report(to: object, report: Report, step: int) -> None:
    """Pass a report to a logger in the form it shows best, or nothing if it accepts neither pages nor text.

    Weights & Biases gets the page, and the verdict and the whole run's figures in its summary. TensorBoard and Comet
    get Markdown. MLflow gets ``feed_report.md`` and ``feed_report.json`` as artifacts.
    """
    found = report.diagnosis
    experiment: Any = getattr(to, "experiment", None)
    if any(kind.__name__ == "WandbLogger" for kind in type(to).__mro__):
        import wandb

        experiment.log({TEXT_TAG: wandb.Html(io.StringIO(as_html(report))), "trainer/global_step": step})
        whole = choose_tags(to_tags(found.stats), "core")
        experiment.summary.update({**whole, "feed/verdict": headline(found)})  # else W&B shows the last window there
    elif callable(getattr(experiment, "add_text", None)):
        experiment.add_text(TEXT_TAG, short_markdown(report), step)
    elif callable(getattr(experiment, "log_text", None)):
        run_id = getattr(to, "run_id", None)
        if run_id is None:
            experiment.log_text(short_markdown(report), step=step)
        else:
            experiment.log_text(run_id, short_markdown(report), "feed_report.md")
            experiment.log_text(run_id, as_json(report), "feed_report.json")


def tuned_hparams(datamodule: object) -> dict[str, Any]:
    """The training loader's settings as hyperparameters, to compare runs by them.

    Args:
        datamodule: a FastDataModule or a wrapped data module whose training loader was made.

    Returns:
        ``feed/num_workers`` and so on, with the loaders' names if there are several. Empty for other data modules, and
        before the loader is made.
    """
    recommendations = getattr(datamodule, "recommendations", None)
    if not isinstance(recommendations, Mapping):
        return {}
    training = {
        name: recommendation.setting
        for name, recommendation in recommendations.items()
        if isinstance(recommendation, Recommendation) and (name == "train" or name.startswith("train["))
    }
    params: dict[str, Any] = {}
    for name, setting in training.items():
        prefix = "feed/"
        if len(training) > 1:
            prefix += f"{name}/"
        params |= {
            f"{prefix}num_workers": setting.num_workers,
            f"{prefix}workers": setting.workers,
            f"{prefix}prefetch_factor": setting.prefetch_factor or 0,
            f"{prefix}pin_memory": setting.pin_memory,
            f"{prefix}persistent_workers": setting.persistent_workers,
        }
    return params


def log_hparams(logger: Any, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Pass the loader's settings to a logger as hyperparameters, with the results. For rank 0, once, after a fit.

    Skips TensorBoard, which accepts hyperparameters only once per run: the user's. Ours would need a second run. The
    settings are in the report.
    """
    if not hasattr(logger.experiment, "add_hparams"):
        logger.log_hyperparams(dict(params))
        logger.log_metrics(dict(metrics))
