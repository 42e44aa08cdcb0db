"""Whatever only observes a run may fail: the run ends as it would have, and what failed is said once.

What is made to raise is found by a trace of real fits: every function of the package that is called on behalf of
GPUStarvationCallback or AutotuneCallback, whoever calls it. None is named here but those that must not fail, because
they stand between the loop and the user's own code.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from cells import in_gate
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from measure.small_fits import CpuPrefetch, Memory, make_trainer
from simulated.device import SimulatedDevice
from torch.utils.data import DataLoader
from trial_steps import Trials

import lightning_feed
from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings
from lightning_feed.callbacks import fit_tuning, starvation_run
from lightning_feed.callbacks.autotune import AutotuneCallback
from lightning_feed.in_fit import goal as goal_file
from lightning_feed.load.rehearsal import Rehearsal
from lightning_feed.load.slot_loaders import in_slots
from lightning_feed.measure import guard, hook_times, loop
from lightning_feed.measure.step_meter import EventRing
from lightning_feed.trials import tune_loader

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="functions are told apart by co_qualname"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
    # What raises in a __del__, or leaves an object half made for its __del__, is shown by Python, and ends nothing.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PACKAGE = os.path.dirname(lightning_feed.__file__) + os.sep  # noqa: PTH120  # compared with code objects' names
OBSERVERS = ("measure/", "verdict/", "report/", "callbacks/starvation_")
"""Files whose functions observe, whoever calls them; those of others do where they are called under the guard."""
PASS_ON = {
    # They call what was there before: a profiler's, a loader's, a progress bar's. What they do besides is guarded.
    "tap_profiler.<locals>.start",
    "tap_profiler.<locals>.stop",
    "tap_profiler.<locals>.profile",
    "_Actions.__missing__",
    "_Announced.__enter__",
    "_Announced.__exit__",
    "HookTimes.timed",
    "_MeasuredRun._add_to_bar",
    "StarvationRun._save_checkpoint",
    # Hooks that make the guard anew, or have to take part in what all ranks do; all else in them is guarded.
    "GPUStarvationCallback._run_begins",
    "AutotuneCallback.setup",
    "AutotuneCallback._count",
    "AutotuneCallback._process",
    "AutotuneCallback.on_train_start",
    "AutotuneCallback.on_train_epoch_start",
    "AutotuneCallback.on_train_batch_end",
    "AutotuneCallback._begin_epoch",
    "AutotuneCallback.on_train_end",
    "AutotuneCallback.on_exception",
    "AutotuneCallback.teardown",
    "AutotuneCallback._new_guard",
}
SILENT = {
    "_ConsoleHandler.emit",
    "LoaderPass.__del__",
    "Probe.close",
    "IndexSource._walk",
    "_Draws._draw",
    "_before_fork",
    "_keep_leases",
    "_after_fork_in_parent",
    "memories",
    "SlotMemory.keep_leases",
    "resend_ctrl_c",
}
"""What would say it, and what Python calls at the end of an object or a generator, or around a fork, where it ignores
errors."""
BY_TIME = {"_merged"}
"""Functions that are called only if steps take very different times, which the next run need not repeat."""
Function = tuple[str, str, int]
"""File, name and line."""


class Broken(Exception):
    """What nothing expects."""


class Trace:
    """Notes the functions that observe, or makes one of them raise whenever it is called."""

    def __init__(self, target: CodeType | None = None) -> None:
        self.target = target
        self.seen: dict[Function, CodeType] = {}
        self.raised = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.target is None:
            if event == "call" and code.co_filename.startswith(PACKAGE) and is_own(code) and observes(frame):
                self.seen[function(code)] = code
        elif code is self.target and event == "call" and observes(frame):
            self.raised += 1
            raise Broken("on purpose")  # and Python takes the trace away: `Again` puts it back


class Again(Callback):
    """Puts the trace back at every hook."""

    def __init__(self, trace: Trace) -> None:
        for name in dir(Callback):
            if name.startswith(("on_", "setup")):
                setattr(self, name, lambda *_, **__: sys.settrace(trace))


def function(code: CodeType) -> Function:
    return code.co_filename.removeprefix(PACKAGE).replace(os.sep, "/"), code.co_qualname, code.co_firstlineno


def is_own(code: CodeType) -> bool:
    """Not a part of another function, nor the guard itself, nor what only passes on."""
    file, name, _ = function(code)
    return code.co_name not in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>") and not (
        file == "measure/guard.py" or name in PASS_ON
    )


def observes(frame: FrameType) -> bool:
    if function(frame.f_code)[0].startswith(OBSERVERS):
        return True
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_filename == guard.__file__:
            return True
        caller = caller.f_back
    return False


# --- the fits -----------------------------------------------------------------------------------------------------


class Bar(ProgressBar):
    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.get_metrics(trainer, pl_module)


class Fit(NamedTuple):
    ours: list[Any]
    others: list[Any]
    data: Any
    options: dict[str, Any]

    def run(self, trace: Trace | None, *, ours: bool = True) -> list[torch.Tensor]:
        """The weights that training ends with."""
        model = BoringModel()
        watched = [] if trace is None else [Again(trace)]
        trainer = make_trainer(*watched, *self.others, *(self.ours if ours else ()), **self.options)
        data = {"datamodule" if isinstance(self.data, Data) else "train_dataloaders": self.data}
        try:
            trainer.fit(model, **data)
        finally:
            sys.settrace(None)
        assert trainer.state.finished
        return list(model.parameters())


class Data(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return RandomDataset(32, 8) if split in ("train", "val") else None


def with_loggers(folder: Path) -> Fit:
    """Everything is shown and logged, by the host's clock; both callbacks, validation, no workers."""
    loggers = [Memory(), CSVLogger(folder)]
    ours = [GPUStarvationCallback(every_n_steps=2), AutotuneCallback()]
    return Fit(
        ours,
        [Bar()],
        Data(4, loader=LoaderSettings(num_workers=0)),
        {
            "logger": loggers,
            "max_epochs": 2,
            "enable_progress_bar": True,
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
        },
    )


def with_workers(folder: Path) -> Fit:
    """By events of a device, with a worker process and a prefetcher."""
    data = DataLoader(RandomDataset(32, 8), 2, shuffle=True, num_workers=1, persistent_workers=True)
    ours = [GPUStarvationCallback(every_n_steps=2, report=False)]
    return Fit(ours, [CpuPrefetch()], data, {"logger": Memory(), "max_epochs": 1})


def with_moves(folder: Path) -> Fit:
    """Workers are changed in the first epoch, by figures that are made up."""
    data = DataLoader(RandomDataset(32, 4), 2, shuffle=True, num_workers=1)
    ours = [AutotuneCallback()]
    return Fit(ours, [], data, {"logger": Memory(), "max_epochs": 3})


def made(make: Callable[[Path], Fit], folder: Path) -> Fit:
    torch.manual_seed(7)
    in_slots.cache_clear()  # made once for each class, and so called in the first fit only
    return make(folder)


@pytest.fixture(autouse=True)
def small_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done now and then in a long fit is done in these."""
    monkeypatch.setattr(loop, "READ_EVERY_NS", 0)
    monkeypatch.setattr(loop, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(loop, "UNFOLDED_STEPS", 3)
    monkeypatch.setattr(hook_times, "FIRST_TIMED", 1)
    monkeypatch.setattr(fit_tuning, "MEASURED_STEPS", 1)
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", 1)

    monkeypatch.setattr(tune_loader.Store, "load", lambda *_: None)  # each fit makes its trials
    monkeypatch.setattr(tune_loader, "run_trial", Trials({0: 0.1, 1: 0.1, 2: 0.03}))
    monkeypatch.setattr(goal_file, "rehearse", lambda *_, **__: Rehearsal())


FITS = (with_loggers, with_workers, with_moves)
PARTS = 6


def traced(make: Callable[[Path], Fit], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Function, CodeType]:
    """The functions that observe in a fit."""
    if make is with_workers:
        monkeypatch.setattr(starvation_run, "open_ring", lambda _: EventRing(SimulatedDevice().event, 512))
    observers = Trace()
    made(make, folder).run(observers)
    return observers.seen


@pytest.mark.slow
@pytest.mark.parametrize("part", in_gate(range(PARTS), [0]))
@pytest.mark.parametrize("make", in_gate({make.__name__: make for make in FITS}, ["with_loggers"]))
def test_an_error_in_any_observer_does_not_end_or_change_the_run(
    make: Callable[[Path], Fit],
    part: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried_before = {seen for earlier in FITS[: FITS.index(make)] for seen in traced(earlier, tmp_path, monkeypatch)}
    expected, observers = made(make, tmp_path).run(None, ours=False), traced(make, tmp_path, monkeypatch)
    assert len(observers) > 50  # the trace has found something
    assert not _said(caplog)
    for target in sorted(observers.keys() - tried_before)[part::PARTS]:
        broken, fit = Trace(observers[target]), made(make, tmp_path)
        try:
            assert_same(fit.run(broken), expected)
        except Broken as error:
            raise AssertionError(f"{target} ends the fit of {make.__name__}") from error
        if not broken.raised and target[1] in BY_TIME:
            continue
        assert broken.raised, target
        who = [line.partition(" ")[0] for line in _said(caplog)]
        assert len(who) == len(set(who)) in range(target[1] not in SILENT, 1 + len(fit.ours)), (target, who)
        caplog.clear()


def assert_same(weights: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, weights, expected))


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for record in caplog.records if "Broken" in (line := record.getMessage())]
