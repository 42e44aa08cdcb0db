"""GPUStarvationCallback: the time that each step spends waiting for data, copying, and computing."""

import logging
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed._host import AnyTrainer, Original, RunStage
from lightning_feed.callbacks import starvation_loggers
from lightning_feed.callbacks.starvation_loggers import LoggerOutput
from lightning_feed.callbacks.starvation_reports import RunReports, chosen_folder
from lightning_feed.callbacks.starvation_run import RunFigures, StarvationRun
from lightning_feed.errors import SettingsError, refuses_unknown_arguments
from lightning_feed.measure import loop
from lightning_feed.measure.guard import Guard, Once, check_instance, guarded
from lightning_feed.measure.measurements import Measurements
from lightning_feed.measure.nvml import NvmlSampler
from lightning_feed.measure.stats import StarvationStats, Which
from lightning_feed.measure.wall import WallClock
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Diagnosis

logger = logging.getLogger(__name__)
_NOTHING = Measurements(stats=StarvationStats(steps=0, confidence="low"))


class GPUStarvationCallback(Callback):
    """Measures how each training step divides into waiting for data, copying, computing and the rest.

    Measuring never synchronises: with CUDA and XPU the parts are times between events on the compute stream, read some
    steps later. The wait for data is measured in every step there, the other parts in one of eight. On the CPU they are
    the host's times. Other devices are timed on the host as well, but with low confidence and one INFO line, because
    the host does not see the work queued there. The figures go to every logger of the Trainer, to the progress bar
    (``feed``: share of the step spent waiting for data), and into a report on the console. On an NVIDIA GPU its
    utilisation, memory, power and PCIe traffic are read once a second. If the callback itself fails, one warning says
    so, and training goes on.

    Args:
        every_n_steps: steps between two logs; each log covers the steps since the last one. None for the Trainer's
            ``log_every_n_steps``. The end of a fit logs the rest.
        report: print the report after 200 steps or a minute, at the end of the fit, and when Ctrl-C, SIGTERM or an
            error ends it; in endless streams every 10 minutes. Later reports print only the verdict and the next step
            if these are unchanged. Fits of fewer than 30 steps, and every fit after the first of a process, print one
            line. Each report is written to ``feed_report.html``, ``.json`` and ``.md``; loggers get it, too, but not
            after Ctrl-C, SIGTERM or an error.
        tags: ``"core"`` logs the speed of training and what it waits for; ``"all"`` adds figures that help to find the
            cause.
        folder: folder for these files. By default the folder that the environment variable ``LIGHTNING_FEED_DIR``
            names, else the first logger's folder on this machine, else the folder of the checkpoints, else
            ``feed_reports`` in the Trainer's ``default_root_dir``. Reports of other runs are kept: the next report is
            ``feed_report-2.html``.

    Raises:
        SettingsError: if ``every_n_steps`` is not a positive integer, ``tags`` is unknown, or the folder is on
            another machine.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_feed import GPUStarvationCallback
        >>> starvation = GPUStarvationCallback(every_n_steps=20)
        >>> trainer = Trainer(callbacks=[starvation], logger=False, accelerator="cpu")
        >>> starvation.report().bottleneck
        'unknown'
    """

    @refuses_unknown_arguments
    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        report: bool = True,
        tags: Which = "core",
        folder: str | Path | None = None,
    ) -> None:
        if every_n_steps is not None and (type(every_n_steps) is not int or every_n_steps < 1):
            raise SettingsError(
                f"GPUStarvationCallback(every_n_steps={every_n_steps!r}): give the number of steps between two logged "
                "windows, a whole number of 1 or more, or leave it out to log when the Trainer logs."
            )
        if tags not in get_args(Which):
            raise SettingsError(f'GPUStarvationCallback(tags={tags!r}): give "core" or "all".')
        self._folder = chosen_folder(folder)
        self.every_n_steps = every_n_steps
        self.tags = tags
        self.print_report = report
        self.was_asked_for = True
        """True if the program itself has the callback. If not, only loggers of Lightning receive figures and reports:
        some packages have a logger of their own, and show its figures to users."""
        self.reads_gpu = True
        """True to read the GPU's own figures from NVML."""
        self._measured_run: _MeasuredRun | None = None
        """The run that is being measured; None outside of one."""
        self._wall = WallClock()
        self._measured: dict[RunStage, Measurements] = {}
        self._last: StarvationStats | None = None
        self._once = Once(logger)
        self._guard = Guard("GPUStarvationCallback", self._let_go)

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners, but a running fit cannot be.
        measured = dict(self._measured)
        if self._measured_run is not None:
            measurements = self._guard.attempt("sum up its figures", self._measured_run.figures.measurements)
            if measurements is not None:
                measured[self._measured_run.run.stage] = measurements
        return {**self.__dict__, "_measured_run": None, "_measured": measured, "_last": self.summary()}

    def summary(self) -> StarvationStats | None:
        """Return the figures logged last, in the current or last fit; None before its first log."""
        measured = self._measured_run
        if measured is not None and measured.run.stage == "fit":
            return measured.figures.last
        return self._last

    def report(self, stage: RunStage = "fit") -> Diagnosis:
        """Return the verdict on what limits training, from all steps measured in the current or last fit.

        Args:
            stage: ``"validate"``, ``"test"`` or ``"predict"`` for the last ``trainer.validate``, ``trainer.test`` or
                ``trainer.predict`` instead.
        """
        if self._measured_run is not None and self._measured_run.run.stage == stage:
            return decide(self._measured_run.figures.measurements())
        return decide(self._measured.get(stage, _NOTHING))

    @property
    def measured_fit(self) -> StarvationRun | None:
        """The fit being measured; None if there is none."""
        if self._measured_run is None or self._measured_run.run.stage != "fit":
            return None
        return self._measured_run.run

    # --- begin and end ------------------------------------------------------------------------------------------------

    log = _host.RunBegins("_run_begins")

    def _run_begins(self) -> None:
        self._guard = Guard("GPUStarvationCallback", self._let_go)
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

    def _begin(self, trainer: AnyTrainer, stage: RunStage) -> None:
        self._let_go()
        callbacks = [
            callback for callback in _host.callbacks_of(trainer) if isinstance(callback, GPUStarvationCallback)
        ]
        if callbacks[0] is not self:
            self._once.say(
                trainer, logging.WARNING, "A second GPUStarvationCallback does nothing: one measures already."
            )
            return
        self._measured.pop(stage, None)
        if stage == "fit":
            self._last = None
        run = StarvationRun(trainer, guard=self._guard, wall=self._wall, stage=stage)
        measured = _MeasuredRun(self, run, self._folder)
        self._measured_run = measured
        run.start()
        device = trainer.strategy.root_device
        if not run.main.ledger.trusted_clock:
            self._once.say(
                trainer,
                logging.INFO,
                f"GPUStarvationCallback: device '{device}' has no timing events. Times are measured on the host, which "
                "does not see queued work, so confidence is low.",
            )
        if self.reads_gpu and trainer.is_global_zero:
            run.nvml = self._guard.attempt("read the GPU's figures", _start_nvml, trainer, device, run, self._once)
        measured.begin_output()
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
        if self._measured_run is not None:
            self._measured_run.run.epoch_began()

    @guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the training step that contains this validation, and measure the validation separately."""
        if self._measured_run is not None:
            self._measured_run.run.validation_began()
        elif trainer.state.fn == "validate":
            self._begin(trainer, "validate")

    @guarded
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the time of the validation, test or prediction; report if it is not part of a fit."""
        measured = self._measured_run
        if measured is None:
            return
        measured.validation_ended()
        if measured.run.stage != "fit":
            self._let_go()

    on_test_end = on_predict_end = on_validation_end

    @guarded
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the steps since the last window, read the device timings that are still outstanding, and report."""
        if self._measured_run is not None:
            self._measured_run.fit_ended()
            self._let_go()

    def on_exception(self, trainer: Trainer, *args: object) -> None:
        """Report, and remove everything from the Trainer: Lightning does not call ``teardown`` after an exception.

        Also called on Ctrl-C and SIGTERM. Nothing here waits for the device, other ranks, or a logger's server.
        """
        check_instance(self, GPUStarvationCallback)
        if self._measured_run is not None:
            self._guard.measure(self._measured_run.interrupted)
        self._guard.measure(self._let_go)

    @guarded
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove everything from the Trainer."""
        self._let_go()

    def _let_go(self) -> None:
        measured = self._measured_run
        self._measured_run = None
        if measured is None:
            return
        run = measured.run
        if run.stage == "fit":
            self._last = measured.figures.last
        measurements = self._guard.attempt("sum up its figures", measured.figures.measurements)
        if measurements is not None:
            self._measured[run.stage] = measurements
        run.close()

    # --- steps --------------------------------------------------------------------------------------------------------

    @guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Record number and size of the first batch's tensors."""
        if self._measured_run is not None:
            self._measured_run.run.batch_came(batch)

    @guarded
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note which loader each batch comes from, and record number and size of the first batch's tensors."""
        if self._measured_run is not None:
            self._measured_run.run.batch_came(batch, dataloader_idx)
            self._measured_run.run.step_ended()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @guarded
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        """Log the figures of a window every ``every_n_steps`` steps, and make a report when it is due."""
        if self._measured_run is not None:
            self._measured_run.step_ended()


class _MeasuredRun:
    """A run that is measured, and the output of its figures. Made when its loop begins, and dropped when it ends.

    Args:
        callback: the callback, whose settings choose the output.
        run: the clocks of the run.
        folder: the folder that the user chose for the reports.
    """

    def __init__(self, callback: GPUStarvationCallback, run: StarvationRun, folder: Path | None) -> None:
        self._trainer = run.trainer
        self._summary = callback.summary
        self.run = run
        self.figures = RunFigures(run)
        self._window_steps = callback.every_n_steps or _host.log_interval(run.trainer)
        self._logged_step = -1
        """The step at which a window was last logged."""
        self._loggers: LoggerOutput | None = None
        """None on ranks that log nothing."""
        self._reports: RunReports | None = None
        """None if there are none to make."""
        if run.trainer.is_global_zero:
            self._loggers = LoggerOutput(run.trainer, run.guard, which=callback.tags, any_logger=callback.was_asked_for)
            if callback.print_report:
                self._reports = RunReports(run.trainer, run.guard, folder=folder, loggers=self._loggers)

    def begin_output(self) -> None:
        """Add a figure to the progress bar, and prepare the loggers."""
        bar = self._trainer.progress_bar_callback
        if bar is not None:
            self.run.guard.attempt("show its figure in the progress bar", self._join_bar, bar)
        if self._loggers is not None:
            self._loggers.lay_out()
            self._loggers.for_each("time the calls of", self.run.time_logger)

    def _join_bar(self, bar: object) -> None:
        self.run.also_undo(_host.Wrap(bar, "get_metrics", self._add_to_bar).undo)

    def _add_to_bar(self, original: Original, *args: object, **kwargs: Any) -> Any:
        items = original(*args, **kwargs)
        ours = self.run.guard.attempt("show its figure in the progress bar", self._bar_item)
        return {**items, **(ours or {})}

    def _bar_item(self) -> dict[str, str]:
        last = self._summary()
        if last is None or last.starved_pct is None:
            return {}
        return {"feed": f"{last.starved_pct:.0f}%"}

    def step_ended(self) -> None:
        """Log the figures of a window if it ends with this step, and make a report if it is due."""
        if self._window_steps:
            step = _host.step_to_log(self._trainer, self._window_steps)
            if step is not None and step != self._logged_step:
                self._log_window(step)
        self.run.step_ended()
        if self._reports is not None and self._reports.is_due(self.run.finished):
            self.run.leave_out_step()  # a step that includes a report does not count
            self._reports.make(self.figures)

    def _log_window(self, step: int) -> None:
        self._logged_step = step
        figures = self.figures.close_window()
        if self._loggers is None:
            return
        began = loop.clock()
        self._loggers.log(figures, step)
        if loop.clock() - began >= starvation_loggers.SLOW_S:
            self.run.leave_out_step()  # a step that includes our slow call does not count

    def fit_ended(self) -> None:
        """Log the steps since the last window, and report."""
        last = _host.steps_logged(self._trainer) - 1
        if self._window_steps and last > self._logged_step:
            self._log_window(last)
        self.figures.end()
        if self._reports is not None:
            self._reports.make(self.figures, ended=True)

    def validation_ended(self) -> None:
        """Log the time of a validation, test or prediction, and report if it is not part of a fit."""
        if self.run.stage != "fit":
            self.figures.end()
        figures = self.figures.loop_tags()
        step = _host.steps_logged(self._trainer)
        if figures and self._loggers is not None:
            self._loggers.log(figures, step)
        if self.run.stage != "fit" and self._reports is not None:
            self._reports.make(self.figures, ended=True, to_loggers=False)

    def interrupted(self) -> None:
        """Report, unless the last report has all steps. Loggers do not get it: a server might not answer."""
        if self._reports is not None and self.run.finished != self._reports.reported_steps:
            self._reports.make(self.figures, ended=True, to_loggers=False)


def _start_nvml(trainer: Trainer, device: torch.device, run: StarvationRun, once: Once) -> NvmlSampler | None:
    """Begin to read the GPU's own figures from NVML."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        once.say(trainer, logging.INFO, f"No GPU figures from NVML: training runs on {device.type}.")
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    sampler = NvmlSampler(uuid, stretch=lambda: run.stretch_of_steps)
    sampler.start()
    return sampler
