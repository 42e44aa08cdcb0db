"""diagnose: one part of the road changed at a time, timed, and everything put back as it was."""

import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from lightning_feed._host import is_overridden
from lightning_feed.backend_measurements import remember_diagnosis
from lightning_feed.diagnosing.beside import own_callbacks
from lightning_feed.diagnosing.fits import Bench
from lightning_feed.diagnosing.globals import ProcessState
from lightning_feed.diagnosing.outcomes import DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten
from lightning_feed.diagnosing.plan import EXPERIMENTS, Found, run_all
from lightning_feed.diagnosing.snapshot import Snapshot
from lightning_feed.diagnosing.stopping import StopSignals
from lightning_feed.diagnosing.trainer import Package, check_trainer, package_of_all, quiet
from lightning_feed.errors import FeedError, ReportError, SettingsError
from lightning_feed.watch.reports.document import make_report, read_document
from lightning_feed.watch.reports.files import check_writable, write_report
from lightning_feed.watch.reports.report import Report
from lightning_feed.watch.verdict import tree
from lightning_feed.watch.verdict.diagnosis import Diagnosis

ARRAYS_KEPT = 64 * 2**20
"""Bytes. Larger arrays of a data module are taken to be read only."""
BUDGET_S, QUICK_BUDGET_S = 90.0, 30.0
BAR = "{desc} {bar} {percentage:3.0f}%"


def diagnose(  # noqa: PLR0913  # one call that says what to train and how far to go; all but three by name
    trainer: Any,
    model: Any,
    datamodule: Any = None,
    *,
    train_dataloaders: Any = None,
    quick: bool = False,
    only: Iterable[str] | None = None,
    out: str | Path | None = None,
    previous: Report | str | Path | None = None,
    budget_s: float | None = None,
    callbacks: bool = False,
) -> Diagnosis:
    """Find what limits training by experiments, and leave everything as it was.

    Trains for some seconds with the loaders as they are, then with the same batches again and again (X1 on the device,
    X2 from the host), on one device, without loggers, checkpoints, validation or other callbacks than PrefetchCallback,
    and without the module's hooks for the end of a training. What was left out is named in the report.
    Then drives the training loader alone, with parts of its work left out (X3 to X8). Module, data module, loaders,
    optimizers, random states and settings of the process are afterwards as they were before, bit for bit. What it found
    of an ImageFolderDataModule is remembered for ``backend="auto"``.

    Args:
        trainer: the Trainer that trains the model. It is only read. None: one that Lightning chooses a device for.
        model: the module. None: only the loader is measured.
        datamodule: what has the training loader, unless ``train_dataloaders`` or the module has it.
        train_dataloaders: as for ``Trainer.fit``.
        quick: a third of the time.
        only: experiments to run, of "X1" to "X8"; None: all. With a module, the run as it is always comes first.
        out: folder for ``feed_report.json``, ``.md`` and ``.html``; None: nothing is written.
        previous: the report of an earlier run, or where it is. What it predicted for remedies that are in effect now is
            held against what was measured, in the ``report_card`` of the files.
        budget_s: seconds to take in all, about; None: 90, quick 30.
        callbacks: run the Trainer's callbacks of your own classes too, in the first of the fits, whatever they write or
            upload in the course of training. Their hooks for its end are not called.

    Raises:
        SettingsError: when there is nothing to load from, or the Trainer cannot be used.
        ReportError: when ``out`` cannot be written to, or ``previous`` cannot be read; nothing was run.
        FeedError: when the run as it is fails; the cause is attached.
        DiagnosisFailed: the same, with what was measured before.
        DiagnosisNotWritten: when the files cannot be written in the end, with the verdict.
        DiagnosisInterrupted: on Ctrl-C and SIGTERM, with what was measured.
    """
    asked = _check_only(only)
    limit_s = budget_s if budget_s is not None else QUICK_BUDGET_S if quick else BUDGET_S
    if limit_s <= 0:
        raise SettingsError(f"budget_s={budget_s!r}: give the seconds that the experiments may take, more than 0.")
    earlier = read_document(previous) if isinstance(previous, (str, Path)) else previous
    if out is not None:
        check_writable(Path(out))  # a minute of experiments is not to be lost in the end
    found = Found(asked=asked, budget_s=limit_s, quick=quick)

    def make_bench() -> Bench:
        bench = _bench(trainer, model, datamodule, train_dataloaders)
        bench.callbacks = own_callbacks(bench.trainer) if callbacks else []
        return bench

    stopped_by, failure = _experiments(found, make_bench)
    diagnosis = tree.diagnose(found.measurements())
    written, problem = _write(diagnosis, out, earlier)
    if stopped_by is not None:
        raise DiagnosisInterrupted(diagnosis, written, stopped_by, None if problem is None else str(problem))
    if failure is not None:
        raise DiagnosisFailed(str(failure), diagnosis, written) from (failure.__cause__ or failure)
    if found.bench is not None:
        remember_diagnosis(found.bench.datamodule, found.bench.trainer.strategy.root_device, diagnosis)
    if problem is not None:
        raise DiagnosisNotWritten(str(problem), diagnosis) from problem
    return diagnosis


def _experiments(found: Found, make_bench: Callable[[], Bench]) -> tuple[int | None, FeedError | None]:
    """All that was asked for, and everything put back: (signal that ended it, failure that ended it).

    Raises:
        FeedError: a failure before anything was measured.
    """
    process, stops = ProcessState(), StopSignals()
    kept: list[Any] = [process]
    interrupted, failure = False, None
    try:
        stops.listen()
        with quiet():
            found.bench = _prepare(make_bench(), stops, kept)
            with tqdm(total=100, desc="diagnose", disable=None, leave=False, bar_format=BAR) as bar:
                run_all(found, kept[1:2], bar)
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:
        # Ctrl-C reaches the workers too, and the loader fails of it.
        if stops.number is None:
            if not isinstance(error, FeedError) or not found.anything():
                raise
            failure = error
    finally:
        stops.hold_back()
        for one in reversed(kept):  # the process last, which has the handlers of signals
            one.restore()
    return (signal.SIGINT if interrupted and stops.number is None else stops.number), failure


def _prepare(bench: Bench, stops: StopSignals, kept: list[Any]) -> Bench:
    """Take down what the experiments will change: into ``kept``, the process first, then the module, then the data."""
    bench.stops = stops
    if bench.trainer.strategy.root_device.type == "cuda":
        kept[0].keep_cuda()
    leave = [bench.trainer]
    of_model = (bench.model, bench.compiled, *bench.callbacks)
    kept.append(Snapshot(*of_model, leave=(*leave, bench.datamodule, bench.loaders)))
    kept.append(Snapshot(bench.datamodule, bench.loaders, leave=(*leave, bench.model), array_limit=ARRAYS_KEPT))
    return bench


def _check_only(only: Iterable[str] | None) -> tuple[str, ...]:
    if only is None:
        return EXPERIMENTS
    asked = tuple(name.strip().upper() for name in (only.split(",") if isinstance(only, str) else only))
    unknown = [name for name in asked if name not in EXPERIMENTS]
    if unknown or not asked:
        raise SettingsError(
            f"only={','.join(asked)!r}: {unknown[0] if unknown else 'nothing'} is no experiment. Give any of "
            f"{', '.join(EXPERIMENTS)}."
        )
    return asked


def _bench(trainer: Any, model: Any, datamodule: Any, loaders: Any) -> Bench:
    if datamodule is not None and loaders is not None:
        raise SettingsError("Give diagnose() a datamodule or train_dataloaders, not both, as for Trainer.fit.")
    if datamodule is None and loaders is None:
        datamodule = getattr(trainer, "datamodule", None)
    if datamodule is None and loaders is None and not (model is not None and is_overridden(model, "train_dataloader")):
        raise SettingsError(
            "diagnose() found no training loader. Give it a datamodule, or train_dataloaders=, or a module with a "
            "train_dataloader() of its own."
        )
    known = [one for one in (trainer, getattr(model, "_orig_mod", model), datamodule) if one is not None]
    package = package_of_all(known) if known else Package("lightning.pytorch")
    if trainer is None:
        trainer = package.root.Trainer(logger=False, enable_checkpointing=False, devices=1)
    else:
        check_trainer(trainer)
    compiled = model if type(model).__name__ == "OptimizedModule" else None
    return Bench(package, trainer, getattr(model, "_orig_mod", model), datamodule, loaders, compiled)


def _write(
    diagnosis: Diagnosis, folder: str | Path | None, earlier: Report | None
) -> tuple[list[Path], ReportError | None]:
    """The files, and why there are none: a full disk must not cost the verdict."""
    if folder is None:
        return [], None
    try:
        report = make_report(diagnosis, previous=earlier)
        return write_report(report, folder), None
    except ReportError as error:
        return [], error
