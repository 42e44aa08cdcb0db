"""GPUStarvationCallback: how long each step waits for data, for the copy, and for its own computing."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed.errors import SettingsError
from lightning_feed.starvation_report import achieved, log_text, run_folder
from lightning_feed.starvation_run import StarvationRun
from lightning_feed.tuning.hparams import log_hparams, tuned_hparams
from lightning_feed.watch.guard import Guard, guarded, say
from lightning_feed.watch.nvml import NvmlSampler
from lightning_feed.watch.reports.document import make_report
from lightning_feed.watch.reports.markdown import diagnosis_markdown
from lightning_feed.watch.reports.text import print_report
from lightning_feed.watch.reports.writing import write_report
from lightning_feed.watch.stats import StarvationStats
from lightning_feed.watch.tags import custom_scalar_layout
from lightning_feed.watch.verdict.diagnosis import Diagnosis, Measurements
from lightning_feed.watch.verdict.tree import diagnose

logger = logging.getLogger(__name__)
_NOTHING = Measurements(stats=StarvationStats(steps=0, confidence="low"))


class GPUStarvationCallback(Callback):
    """Measures how each training step divides into waiting for data, copying, computing and the rest.

    Nothing is synchronised: with CUDA and XPU the parts are times between events on the compute stream, read when they
    have passed, some steps later. On the CPU they are the host's times. On other devices, too, which is said in one
    INFO line: the host does not see the work that is queued there, so confidence is low. The figures go to every logger
    of the Trainer, to the progress bar (``feed``: share of the step spent waiting for data), and into a report on the
    console. Whatever of this fails is said once as a warning, and training goes on without it.

    Args:
        every_n_steps: steps between two logged windows; None: the Trainer's ``log_every_n_steps``.
        nvml: read the GPU's utilisation, memory, power and PCIe traffic beside it, once a second.
        report: print the report at the end of the first epoch and of the fit. At the end of the fit it also goes to
            the loggers as text, and into ``feed_report.json`` and ``feed_report.md`` in the first logger's folder.

    Raises:
        SettingsError: when ``every_n_steps`` is not a positive integer.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_feed import GPUStarvationCallback
        >>> starvation = GPUStarvationCallback(every_n_steps=20)
        >>> trainer = Trainer(callbacks=[starvation], logger=False, accelerator="cpu")
        >>> starvation.report().bottleneck
        'unknown'
    """

    def __init__(self, every_n_steps: int | None = None, nvml: bool = True, report: bool = True) -> None:  # noqa: FBT001, FBT002  # the promised signature
        whole = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if every_n_steps is not None and (not whole or every_n_steps < 1):
            raise SettingsError(
                f"GPUStarvationCallback(every_n_steps={every_n_steps!r}): give the number of steps between two logged "
                "windows, a whole number of 1 or more, or leave it out to log when the Trainer logs."
            )
        self.every_n_steps = every_n_steps
        self.nvml = nvml
        self.print_report = report
        self._run: StarvationRun | None = None
        self._measured = _NOTHING
        self._last: StarvationStats | None = None
        self._epoch_reported = False
        self._reported_steps = 0
        self._laid_out: weakref.WeakSet[Any] | None = None
        self._told: set[str] = set()
        self._guard = self._new_guard()

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for `ddp_spawn`, and callbacks are deep-copied by tuners. A running fit can be neither.
        run = self._run
        measured = self._guard.attempt("sum up its figures", run.measurements) if run is not None else self._measured
        return {
            **self.__dict__,
            "_run": None,
            "_measured": measured or _NOTHING,
            "_last": self.summary(),
            "_laid_out": None,
        }

    def summary(self) -> StarvationStats | None:
        """The last window that was closed, of this fit or the one before; None before the first."""
        return self._run.last if self._run is not None else self._last

    def report(self) -> Diagnosis:
        """What limits training, from all steps measured in this fit or the last one."""
        return diagnose(self._run.measurements() if self._run is not None else self._measured)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the clocks up, unless another instance measures already."""
        self._guard = self._new_guard()
        self._guard.measure(self._begin, trainer)

    def _new_guard(self) -> Guard:
        return Guard("GPUStarvationCallback", self._let_go)

    def _begin(self, trainer: Any) -> None:
        self._let_go()
        if next(one for one in trainer.callbacks if isinstance(one, GPUStarvationCallback)) is not self:
            self._say_once(
                trainer, logging.WARNING, "A second GPUStarvationCallback stands aside: one measures already."
            )
            return
        every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps
        self._measured, self._last = _NOTHING, None
        self._epoch_reported, self._reported_steps = False, 0
        run = self._run = StarvationRun(trainer, every=every, guard=self._guard)
        device = trainer.strategy.root_device
        if not run.sees_device:
            self._say_once(
                trainer,
                logging.INFO,
                f"GPUStarvationCallback: there are no timing events to use on device '{device}'. The times are the "
                "host's, which does not see the work that is queued, so confidence is low.",
            )
        run.nvml = self._guard.attempt("read the GPU's figures", self._start_nvml, trainer, device)
        if trainer.progress_bar_callback is not None:
            self._guard.attempt("show its figure in the progress bar", self._join_bar, trainer.progress_bar_callback)
        if trainer.is_global_zero:
            self._for_each_logger(trainer, "lay its figures out in", self._lay_out)
        if not trainer.loggers:
            self._say_once(
                trainer,
                logging.WARNING,
                "GPUStarvationCallback: the Trainer has no logger, so nothing is logged. summary() and report() "
                "still tell what was measured.",
            )

    @guarded
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch: its first batch has a figure of its own."""
        if self._run is not None:
            self._run.epoch_began()

    @guarded
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the training step in which this validation lies."""
        if self._run is not None:
            self._run.validation_began()

    @guarded
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is still on the device, and report."""
        run = self._run
        if run is None:
            return
        run.end()
        if run.finished > self._reported_steps:
            self._print(trainer, run)
        if run.finished:
            self._publish(trainer)
        self._let_go()

    @guarded
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report after the first epoch of the fit."""
        if self._run is not None and not self._epoch_reported:
            self._epoch_reported = True
            self._print(trainer, self._run)

    @guarded
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take out what was put in: teardown is not called after an exception."""
        self._let_go()

    @guarded
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take out what was put in."""
        self._let_go()

    def _let_go(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        self._measured = self._guard.attempt("sum up its figures", run.measurements) or self._measured
        self._last = run.last
        run.close()

    # --- windows ------------------------------------------------------------------------------------------------------

    @guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at what a batch is made of, once."""
        if self._run is not None:
            self._run.batch_came(batch)

    @guarded
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Close a window, and log it, where the Trainer logs."""
        run = self._run
        if run is None:
            return
        if run.every:
            step = _host.step_to_log(trainer, run.every)
            if step is not None and step != run.logged_step:
                run.logged_step = step
                self._log_window(trainer, run, step)
        run.step_ended()

    def _log_window(self, trainer: Trainer, run: StarvationRun, step: int) -> None:
        tags = run.close_window()
        if trainer.is_global_zero:
            self._for_each_logger(trainer, "log its figures to", lambda one: one.log_metrics(tags, step=step))

    def _for_each_logger(self, trainer: Any, task: str, give: Callable[[Any], object]) -> None:
        """Logger by logger: one that fails takes nothing from the others."""
        for number, each in enumerate(trainer.loggers):
            self._guard.attempt(f"{task} {type(each).__name__} (trainer.loggers[{number}])", give, each)

    # --- what users see -----------------------------------------------------------------------------------------------

    def _print(self, trainer: Trainer, run: StarvationRun) -> None:
        self._reported_steps = run.finished
        if self.print_report and trainer.is_global_zero:
            self._guard.attempt("print its report", lambda: print_report(self.report(), _host.bar_printer(trainer)))

    def _publish(self, trainer: Any) -> None:
        """The report as text in the loggers, and as files in the folder of the run."""
        if not self.print_report or not trainer.is_global_zero:
            return
        found = self._guard.attempt("make its report", self.report)
        if found is None:
            return
        params = self._guard.attempt("tell the settings of the loader", tuned_hparams, trainer.datamodule)
        if params:
            self._for_each_logger(
                trainer, "give the settings of the loader to", lambda one: log_hparams(one, params, achieved(found))
            )
        step = trainer.global_step
        self._for_each_logger(trainer, "give its report to", lambda one: log_text(one, diagnosis_markdown(found), step))
        self._guard.attempt("write its report", _write, trainer, found)

    def _join_bar(self, bar: Any) -> None:
        wrap = _host.Wrap(bar, "get_metrics", self._add_to_bar)
        if self._run is not None:
            self._run.also_undo(wrap.undo)

    def _add_to_bar(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        items = original(*args, **kwargs)
        ours = self._guard.attempt("show its figure in the progress bar", self._bar_item)
        return {**items, **ours} if ours else items

    def _bar_item(self) -> dict[str, str]:
        last = self.summary()
        return {} if last is None or last.starved_pct is None else {"feed": f"{last.starved_pct:.0f}%"}

    def _lay_out(self, to: Any) -> None:
        """Tell TensorBoard how to draw the tags, once for each of its writers."""
        if self._laid_out is None:
            self._laid_out = weakref.WeakSet()
        experiment: Any = getattr(to, "experiment", None)
        if callable(getattr(experiment, "add_custom_scalars", None)) and experiment not in self._laid_out:
            self._laid_out.add(experiment)
            experiment.add_custom_scalars(custom_scalar_layout())

    def _start_nvml(self, trainer: Trainer, device: torch.device) -> NvmlSampler | None:
        if not self.nvml or not trainer.is_global_zero:
            return None
        if device.type != "cuda" or torch.version.hip is not None:
            self._say_once(trainer, logging.INFO, f"No GPU figures from NVML: training runs on {device.type}.")
            return None
        sampler = NvmlSampler(str(torch.cuda.get_device_properties(device).uuid))
        sampler.start()
        return sampler

    def _say_once(self, trainer: Trainer, level: int, what: str) -> None:
        if what not in self._told and trainer.is_global_zero:
            say(logger, level, what)
        self._told.add(what)


def _write(trainer: Any, found: Diagnosis) -> None:
    folder = run_folder(trainer)
    if folder is not None:
        write_report(make_report(found), folder)
