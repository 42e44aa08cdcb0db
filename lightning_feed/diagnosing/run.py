"""diagnose: one part of the road changed at a time, timed, and everything put back as it was."""

import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from lightning_feed._host import is_overridden
from lightning_feed.diagnosing.fits import Bench
from lightning_feed.diagnosing.globals import ProcessState
from lightning_feed.diagnosing.plan import EXPERIMENTS, Found, run_all
from lightning_feed.diagnosing.snapshot import Snapshot
from lightning_feed.diagnosing.trainer import Package, check_trainer, package_of, quiet
from lightning_feed.errors import SettingsError
from lightning_feed.image_measured import remember_diagnosis
from lightning_feed.watch.verdict import tree
from lightning_feed.watch.verdict.diagnosis import Diagnosis

ARRAYS_KEPT = 64 * 2**20
"""Bytes. Larger arrays of a data module are taken to be read only."""
BUDGET_S, QUICK_BUDGET_S = 90.0, 30.0
BAR = "{desc} {bar} {percentage:3.0f}%"


class DiagnosisInterrupted(KeyboardInterrupt):
    """Ctrl-C while experiments ran. Everything was put back; what had been measured by then is here."""

    def __init__(self, diagnosis: Diagnosis, written: list[Path]) -> None:
        super().__init__("diagnose() was interrupted")
        self.diagnosis = diagnosis
        """The verdict on what was measured."""
        self.written = written
        """Its files."""


def diagnose(  # noqa: PLR0913  # one call that says what to train and how far to go; all but three by name
    trainer: Any,
    model: Any,
    datamodule: Any = None,
    *,
    train_dataloaders: Any = None,
    quick: bool = False,
    only: Iterable[str] | None = None,
    out: str | Path | None = None,
    budget_s: float | None = None,
) -> Diagnosis:
    """Find what limits training by experiments, and leave everything as it was.

    Trains for some seconds with the loaders as they are, then with the same batch again and again (X1 on the device, X2
    from the host), on one device, without loggers, checkpoints, validation or other callbacks than PrefetchCallback.
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
        budget_s: seconds to take in all, about; None: 90, quick 30.

    Raises:
        SettingsError: when there is nothing to load from, or the Trainer cannot be used.
        FeedError: when the run as it is fails; the cause is attached.
        DiagnosisInterrupted: on Ctrl-C, with what was measured.
    """
    asked = _check_only(only)
    limit_s = budget_s if budget_s is not None else QUICK_BUDGET_S if quick else BUDGET_S
    if limit_s <= 0:
        raise SettingsError(f"budget_s={budget_s!r}: give the seconds that the experiments may take, more than 0.")
    process = ProcessState()
    kept: list[Any] = [process]
    found = Found(asked=asked, budget_s=limit_s, quick=quick)
    interrupted = False
    try:
        with quiet():
            bench = _bench(trainer, model, datamodule, train_dataloaders)
            if bench.trainer.strategy.root_device.type == "cuda":
                process.keep_cuda()
            kept += _snapshots(bench, trainer)
            found.bench = bench
            with tqdm(total=100, desc="diagnose", disable=None, leave=False, bar_format=BAR) as bar:
                run_all(found, kept[1:2], bar)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        _put_back(kept)
    diagnosis = tree.diagnose(found.measurements())
    written = _write(diagnosis, out) if out is not None else []
    if interrupted:
        raise DiagnosisInterrupted(diagnosis, written)
    if found.bench is not None:
        remember_diagnosis(found.bench.datamodule, found.bench.trainer.strategy.root_device, diagnosis)
    return diagnosis


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
    known = next((one for one in (trainer, getattr(model, "_orig_mod", model), datamodule) if one is not None), None)
    package = Package("lightning.pytorch") if known is None else package_of(known)
    if trainer is None:
        trainer = package.root.Trainer(logger=False, enable_checkpointing=False, devices=1)
    else:
        check_trainer(trainer)
    compiled = model if type(model).__name__ == "OptimizedModule" else None
    return Bench(package, trainer, getattr(model, "_orig_mod", model), datamodule, loaders, compiled)


def _snapshots(bench: Bench, trainer: Any) -> list[Any]:
    """Of the module, then of all that has to do with data."""
    leave = [one for one in (trainer, bench.trainer) if one is not None]
    model = Snapshot(bench.model, bench.compiled, leave=(*leave, bench.datamodule, bench.loaders))
    data = Snapshot(bench.datamodule, bench.loaders, leave=(*leave, bench.model), array_limit=ARRAYS_KEPT)
    return [model, data]


def _put_back(kept: list[Any]) -> None:
    """Everything as it was, whatever Ctrl-C does meanwhile; the process last, which has the handler of Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for one in reversed(kept):
        one.restore()


def _write(diagnosis: Diagnosis, folder: str | Path) -> list[Path]:
    from lightning_feed.watch.reports.document import make_report
    from lightning_feed.watch.reports.writing import write_report

    return write_report(make_report(diagnosis), folder, forms=("json", "md", "html"))
