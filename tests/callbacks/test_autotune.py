"""AutotuneCallback with made-up trials: what it sets, when, and what it leaves alone."""

import copy
import json
import logging
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import covering, in_gate
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from measure.small_fits import Memory
from measure.test_ranks_gloo import in_ranks
from recording import NullStreamPrefetch, Numbers, Recording, Stream, by_hook, fit, quiet_trainer
from resuming import SaveThenDie, run, trained
from slot_memory import memory_of
from torch.utils.data import DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from trial_steps import THREE_ARE_BEST, QuietMachine, Trials
from trials.machines import workers

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings, _host
from lightning_feed.callbacks import fit_tuning
from lightning_feed.callbacks import starvation as starvation_module
from lightning_feed.callbacks import starvation_run as starvation_run_module
from lightning_feed.callbacks.autotune import AutotuneCallback
from lightning_feed.callbacks.starvation_run import StarvationRun
from lightning_feed.diagnosing import tune as tune_command
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.in_fit import goal as goal_file
from lightning_feed.load import build
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.rehearsal import Rehearsal
from lightning_feed.machine.limits import Machine, read_machine
from lightning_feed.machine.private_files import cache_folder
from lightning_feed.measure.loop import MeasuredLoop
from lightning_feed.measure.wall import WallClock
from lightning_feed.report import report as report_file
from lightning_feed.trials import search, time_left, tune_loader
from lightning_feed.trials.training_work import TrainingWork
from lightning_feed.trials.tune_loader import Tuned

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
SAMPLES = 24
BATCH = 4


MEASURED = 4
"""Steps after which the trials run in these tests, of 6 in an epoch, with no batches ahead."""


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    return make_up_trials(monkeypatch.setattr)


def make_up_trials(replace_in: Callable[[Any, str, Any], None]) -> Trials:
    """Trials and steps that take the same time on any machine, the limits of one machine, and a rehearsal that passes:
    load/test_rehearsal.py has real ones, each of several processes."""
    made = Trials(THREE_ARE_BEST)
    replace_in(tune_loader, "run_trial", made)
    replace_in(fit_tuning, "rehearsal_of", lambda *_: Rehearsal())
    replace_in(fit_tuning, "MEASURED_STEPS", MEASURED - 20)  # the warm-up is 20 steps
    replace_in(fit_tuning, "PROVING_STEPS", 10**6)
    replace_in(fit_tuning, "_STEPS_LEFT", 0)
    replace_in(time_left, "LEAST_S", 0.0)  # these fits end at once
    replace_in(time_left, "BLIND_SHARE", math.inf)
    replace_in(search, "UNLIKE", math.inf)  # their steps take other times than the made-up ones
    replace_in(fit_tuning, "step_noise_ms", lambda run: 0.0)
    work_of = fit_tuning.work_of

    def short_work(measured: Any) -> TrainingWork | None:
        """On a busy machine a step takes 50 ms, for which two made-up workers would be enough."""
        work = work_of(measured)
        return work and replace(work, step_s=min(work.step_s, 0.01), cpu_s=min(work.cpu_s, 0.01))

    replace_in(fit_tuning, "work_of", short_work)
    machine = Machine(
        usable_cpus=2,
        cpu_reason="made up",
        available_memory_bytes=2**40,
        free_shm_bytes=2**40,
        start_method=multiprocessing.get_all_start_methods()[0],
    )
    replace_in(tune_loader, "read_machine", lambda: machine)
    replace_in(tune_loader, "OtherPrograms", QuietMachine)
    replace_in(fit_tuning, "OtherPrograms", QuietMachine)
    replace_in(goal_file, "read_machine", lambda: machine)
    replace_in(build, "read_machine", lambda: machine)
    return made


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lightning_feed.callbacks.autotune"]


class Watching(Callback):
    """The number of workers of the iterator that gives the batches, at each step."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append([])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen[-1].append(workers_at_work(trainer))

    @property
    def last(self) -> list[int]:
        """The number of workers at the end of each epoch."""
        return [epoch[-1] for epoch in self.seen]


def workers_at_work(trainer: Any) -> int:
    (iterator,) = _host.loop_iterators(trainer, "fit")
    inner = getattr(iterator, "source", iterator)
    return int(getattr(inner, "_num_workers", -1))


def plain(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "train_dataloaders": DataLoader(Numbers(SAMPLES), **{"batch_size": BATCH, "shuffle": True, **options})
    }


def ours(**options: Any) -> Callable[[], dict[str, Any]]:
    def loaders() -> dict[str, Any]:
        data = Numbers(SAMPLES)
        sampler = RandomSampler(data)
        return {"train_dataloaders": FeedLoader(data, **{"batch_size": BATCH, "sampler": sampler, **options})}

    return loaders


class Birds(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Numbers(SAMPLES) if split == "train" else None


def module(**settings: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"datamodule": Birds(BATCH, loader=LoaderSettings(**settings))}


class Unsized(Sampler[int]):
    """Has no ``__len__``."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).tolist())


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": plain(num_workers=1),
    "plain, no workers": plain(),
    "plain, persistent, seeded": lambda: plain(
        num_workers=1, persistent_workers=True, generator=torch.Generator().manual_seed(3)
    )(),
    "plain, no workers, seeded": lambda: plain(generator=torch.Generator().manual_seed(3))(),
    "ours, no workers, seeded": lambda: ours(
        sampler=RandomSampler(Numbers(SAMPLES), generator=torch.Generator().manual_seed(3))
    )(),
    "ours, no workers, a sampler without a length": lambda: ours(sampler=Unsized())(),
    "ours, persistent, background": ours(num_workers=1, persistent_workers=True, background=2),
    "ours, in an order": lambda: ours(num_workers=1, order=EpochOrder(seed=1, epoch=lambda: 0))(),
    "threads, persistent": ours(num_workers=1, workers="thread", persistent_workers=True),
    "datamodule": module(num_workers=1),
    "datamodule, threads": module(num_workers=1, workers="thread"),
}


class DrawsAtOnce(Sampler[int]):
    """Draws when its iteration begins, not when the first index is asked for, as torch's own do."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


LOADERS["plain, its sampler draws at once"] = plain(shuffle=False, sampler=DrawsAtOnce())
LOADERS["plain, workers, its sampler draws at once"] = plain(shuffle=False, sampler=DrawsAtOnce(), num_workers=1)


class DrawsBatchesAtOnce(Sampler[list[int]]):
    """Draws when its iteration begins, as samplers that sort samples by their lengths do."""

    def __iter__(self) -> Any:
        return iter([part.tolist() for part in torch.randperm(SAMPLES).split(BATCH)])

    def __len__(self) -> int:
        return SAMPLES // BATCH


LOADERS["plain, its batch sampler draws at once"] = lambda: {
    "train_dataloaders": DataLoader(Numbers(SAMPLES), batch_sampler=DrawsBatchesAtOnce())
}


def no_process_is_left() -> bool:
    """A child that was killed may need a moment to end."""
    for _ in range(200):
        if not multiprocessing.active_children():
            return True
        time.sleep(0.05)
    return False


TUNED = [
    "plain, no workers",
    "ours, no workers, seeded",
    "threads, persistent",
    "datamodule",
    "plain, workers, its sampler draws at once",
]
"""Loaders that the gate tunes."""
REVERTED = [
    "plain, persistent, seeded",
    "ours, no workers, a sampler without a length",
    "ours, persistent, background",
    "ours, in an order",
]
"""Loaders that the gate tunes, and whose tuning it takes back."""


@pytest.mark.parametrize("name", in_gate(list(LOADERS), TUNED))
@pytest.mark.parametrize("best", [3, pytest.param(0, marks=pytest.mark.nightly)])
def test_samples_order_and_weights_equal_those_of_an_untuned_fit(name: str, best: int, trials: Trials) -> None:
    """The model has dropout and the samplers draw from torch's generators, so a draw too many would show."""
    expected, _, _ = fit([], LOADERS[name], max_epochs=3)
    trials.steps_s = {0: 0.1, 1: 0.09, 2: 0.08, 3: 0.07, best: 0.03}
    callback = AutotuneCallback(max_workers=3)
    changed, _, error = fit([callback], LOADERS[name], max_epochs=3)
    assert error is None
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))
    own = 0 if "no workers" in name or (name.endswith("draws at once") and "workers" not in name) else 1
    assert [move.setting.num_workers for move in callback.moves] == ([] if own == best else [best])
    assert no_process_is_left()


@pytest.mark.parametrize("loaders", [pytest.param(plain(), marks=pytest.mark.nightly), plain(num_workers=1), ours()])
def test_tuned_loaders_hand_batches_over_in_slots(loaders: Any, trials: Trials) -> None:
    in_slots = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            (iterator,) = _host.loop_iterators(trainer, "fit")
            in_slots.append(memory_of(getattr(iterator, "source", iterator)) is not None)

    fit([AutotuneCallback(max_workers=3), Looks()], loaders, max_epochs=3)
    assert not any(in_slots[: MEASURED - 1])  # the user's own loader is measured as it is
    assert all(in_slots[MEASURED + 2 :])
    own, *others = [setting for setting, work in zip(trials.settings, trials.works, strict=True) if work.step_s]
    assert not own.in_place
    assert [setting.in_place for setting in others] == [setting.num_workers > 0 for setting in others]


ONE = {0: 0.1, 1: 0.03}
"""One worker is best, and more are not tried."""


def place_of(trainer: Any) -> bool:
    """True if the iterator that gives the batches has its workers leave them in slots."""
    (iterator,) = _host.loop_iterators(trainer, "fit")
    return memory_of(getattr(iterator, "source", iterator)) is not None


@pytest.mark.parametrize(
    ("share", "seen", "after_ms", "kept"),
    [
        (0.5, "by the trials", 9.0, True),
        # No more than repeated measurements differ.
        pytest.param(0.5, "by the trials", 9.9, False, marks=pytest.mark.nightly),
        pytest.param(1.0, "by training only", 9.0, True, marks=pytest.mark.nightly),
        (1.0, "by training only", 9.9, False),
        (1.0, "by none: the device does not pin", 9.0, False),
        (1.0, "by none: training never waits", 9.0, False),
    ],
)
def test_the_users_number_of_workers_hands_over_in_place_if_training_gains(
    share: float,
    seen: str,
    after_ms: float,
    kept: bool,
    trials: Trials,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    trials.steps_s = ONE
    trials.in_place_share = share
    if "pin" not in seen:
        monkeypatch.setattr(fit_tuning, "REGISTERING_DEVICES", ("cpu",))
    if "never" in seen:
        monkeypatch.setattr(fit_tuning, "ALIKE", math.inf)
    steps_ms = iter([10.0, after_ms])
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: next(steps_ms))
    places = []
    looking = LambdaCallback(on_train_batch_end=lambda trainer, *_: places.append(place_of(trainer)))
    loaders = plain(batch_size=1, num_workers=1)
    expected, _, _ = fit([], loaders, max_epochs=2)
    callback = AutotuneCallback(max_workers=1)
    changed, _, error = fit([callback, looking], loaders, max_epochs=2)
    assert error is None
    assert by_hook(changed.events) == by_hook(expected.events)
    assert places[0] is False
    assert any(places) is ("none" not in seen)
    assert places[-1] is kept
    assert {move.setting.num_workers for move in callback.moves} <= {1}
    (saved,) = (cache_folder() / "tuning").iterdir()
    tuned = json.loads(saved.read_text())["tuned"]
    assert tuned["setting"]["in_place"] is kept
    if "none" not in seen:
        figures = f"training itself took 10 ms a step with num_workers=1, prefetch_factor=2 and {after_ms:.3g}"
        assert tuned["reason"] == f"{figures} with num_workers=1, prefetch_factor=2, in place"
        what = "keeps" if kept else "goes back to"
        assert own_lines(caplog)[-1].startswith(f"AutotuneCallback, epoch 0, {what} num_workers=1, prefetch_factor=2")


@pytest.mark.parametrize("is_cuda", [True, False])
def test_the_next_run_tries_again_if_training_could_not_compare(
    *, is_cuda: bool, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fit ends before the proof. Where nothing has to be proven, its result is remembered."""
    trials.steps_s = ONE
    if is_cuda:
        monkeypatch.setattr(fit_tuning, "REGISTERING_DEVICES", ("cpu",))
        monkeypatch.setattr(fit_tuning, "ALIKE", 1.0)  # any wait is worth it
    counts = []
    for _ in range(2):
        fit([AutotuneCallback(max_workers=1)], plain(batch_size=1, num_workers=1), max_epochs=1)
        counts.append(len(trials.settings))
    assert (counts[1] > counts[0]) is is_cuda


def test_a_loader_with_in_order_false_changes_only_between_epochs(trials: Trials) -> None:
    watching = Watching()
    fit([AutotuneCallback(max_workers=3), watching], plain(num_workers=2, in_order=False), max_epochs=3)
    assert watching.last == [2, 2, 3]  # the trials run in the second epoch


def test_new_workers_take_over_within_the_same_epoch_and_one_log_line_says_why(
    trials: Trials, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    log = Memory()
    watching = Watching()
    fit([callback := AutotuneCallback(max_workers=3), watching], plain(), max_epochs=2, logger=log)
    assert watching.seen == [[0] * MEASURED + [3] * 2, [3] * 6]
    (line,) = own_lines(caplog)
    assert line.startswith(
        "AutotuneCallback, epoch 0: num_workers 0 -> 3, prefetch_factor None -> 2, "
        "batches in place: the fastest of 4 tried "
        "(num_workers=0: 100 ms a step, num_workers=3, prefetch_factor=2, in place: 30 ms a step). "
    )
    (move,) = callback.moves
    assert (move.epoch, move.setting.num_workers, move.setting.persistent_workers) == (0, 3, False)
    mine = [(step, row) for step, row in log.rows if "feed/num_workers" in row]
    assert mine == [(MEASURED - 1, {"feed/num_workers": 3.0, "feed/prefetch_factor": 2.0})]
    (work,) = set(trials.works)  # which the trials imitate
    assert 0 < work.step_s < 1
    assert 0 <= work.cpu_s <= work.step_s
    assert (work.threads, work.on_device) == (torch.get_num_threads(), False)


def test_the_users_setting_is_kept_when_no_other_is_faster(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    trials.steps_s = {0: 0.1, 1: 0.0305, 2: 0.031, 3: 0.03}
    watching = Watching()
    fit([callback := AutotuneCallback(max_workers=3), watching], plain(num_workers=1), max_epochs=3)
    assert own_lines(caplog) == [
        "AutotuneCallback keeps num_workers=1, prefetch_factor=2: none of 4 tried makes steps more than 3% shorter."
    ]
    assert callback.moves == ()
    assert watching.last == [1] * 3


def test_the_users_loader_object_is_not_modified(trials: Trials) -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Numbers(SAMPLES), BATCH, shuffle=True, num_workers=1, generator=generator)
    before = dict(vars(loader))
    watching = Watching()
    fit([AutotuneCallback(max_workers=3), watching], lambda: {"train_dataloaders": loader}, max_epochs=2)
    assert watching.last[-1] == 3
    assert vars(loader) == before


@pytest.mark.parametrize("tuner", [(), (AutotuneCallback(max_workers=3),)])
def test_a_report_tells_whether_the_run_was_tuned(tuner: tuple[Callback, ...], trials: Trials) -> None:
    starvation = GPUStarvationCallback(report=False)
    fit([*tuner, starvation], plain(num_workers=1))
    facts = starvation.report().measurements.facts.trainer
    assert (facts.tuned, facts.tuned_outside) == (bool(tuner), False)


def test_the_starvation_report_restarts_once_after_the_trials_and_covers_only_the_new_workers(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[StarvationRun] = []
    restart = StarvationRun.restart
    monkeypatch.setattr(StarvationRun, "restart", lambda run: runs.append(run) or restart(run))
    watched: list[StarvationRun | None] = []
    starvation = GPUStarvationCallback(report=False)
    watching = LambdaCallback(on_train_batch_start=lambda *_: watched.append(starvation.measured_fit))
    fit([AutotuneCallback(max_workers=3), starvation, watching], plain(batch_size=1), max_epochs=2)
    assert runs == [watched[0]]
    assert starvation.report().measurements.facts.loader.num_workers == 3
    assert starvation.report().stats.steps <= 48 - MEASURED


TRIAL_S = 31


@covering(best={"kept": 1, "changed": 3}, is_tuned_first=[True, False])
def test_the_time_of_trials_is_a_part_of_the_wall_time_and_of_no_step(
    *, is_tuned_first: bool, best: int, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading of the clock takes 1 us, and a trial 31 s."""
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += 1000
        return now_ns

    def slow_trial(*args: Any, **kwargs: Any) -> Any:
        nonlocal now_ns
        now_ns += TRIAL_S * 10**9
        return trials(*args, **kwargs)

    monkeypatch.setattr(tune_loader, "run_trial", slow_trial)
    monkeypatch.setattr(starvation_module, "WallClock", partial(WallClock, clock))
    monkeypatch.setattr(starvation_run_module, "MeasuredLoop", partial(MeasuredLoop, clock=clock))
    trials.steps_s = {0: 0.1, 1: 0.09, 2: 0.05, best: 0.03}
    starvation = GPUStarvationCallback(report=False)
    callbacks = [AutotuneCallback(max_workers=3, budget_s=1000), starvation]
    fit(callbacks if is_tuned_first else callbacks[::-1], plain(batch_size=1, num_workers=1), max_epochs=2)
    measured = starvation.report().measurements
    assert measured.wall is not None
    assert measured.wall.times("trials") == 1
    assert measured.wall.seconds("trials") == pytest.approx(TRIAL_S * len(trials.settings), abs=0.1)
    assert measured.wall.run_s < 1
    assert measured.timeline is not None
    assert max(steps.to_ms for steps in measured.timeline.bins) < 1000


@pytest.mark.parametrize("made", in_gate(list(LOADERS), REVERTED))
@pytest.mark.parametrize("after_ms", [11.0, pytest.param(9.0, marks=pytest.mark.nightly)])
def test_only_a_slower_setting_is_reverted_and_samples_stay_the_same(
    made: str, after_ms: float, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials imitate training, and may be wrong; samples, their order and the weights stay the same all the time."""
    steps_ms = iter([10.0, after_ms])
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: next(steps_ms))
    expected, _, _ = fit([], LOADERS[made], max_epochs=4)
    callback = AutotuneCallback(max_workers=3)
    changed, _, error = fit([callback], LOADERS[made], max_epochs=4)
    assert error is None
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))
    goes_back = after_ms > 10 and made != "ours, no workers, a sampler without a length"
    numbers = [move.setting.num_workers for move in callback.moves]
    assert numbers[0] == 3
    assert [number < 3 for number in numbers[1:]] == [True] * goes_back
    kept = [json.loads(file.read_text())["tuned"] for file in (cache_folder() / "tuning").iterdir()]
    assert {tuned["setting"]["num_workers"] for tuned in kept} == {callback.moves[-1].setting.num_workers}


def test_a_slower_setting_is_reverted_within_the_same_epoch(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps_ms = iter([10.0, 12.5])
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: next(steps_ms))
    caplog.set_level(logging.INFO, logger="lightning_feed")
    watching = Watching()
    fit([AutotuneCallback(max_workers=3), watching], plain(batch_size=1, num_workers=1), max_epochs=2)
    assert sorted(set(watching.seen[0])) == [1, 3]
    assert watching.seen[0][0] == watching.seen[0][-1] == 1
    assert "back to num_workers=1" in own_lines(caplog)[-1]
    assert "training itself took 10 ms a step with num_workers=1" in own_lines(caplog)[-1]
    assert "and 12.5 with num_workers=3" in own_lines(caplog)[-1]


@pytest.mark.parametrize(
    ("without_ms", "expected"), [(6.0, 0), (9.9, 1), pytest.param(12.0, 1, marks=pytest.mark.nightly)]
)
def test_no_workers_are_compared_by_training_where_trials_cannot_tell(
    without_ms: float, expected: int, trials: Trials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trials take 1 ms for a batch, and 90 ms a step with the user's worker, where training took 10."""
    steps_ms = iter([10.0, without_ms])
    trials.steps_s = {0: 0.001, 1: 0.09}
    monkeypatch.setattr(search, "UNLIKE", 1.25)
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: next(steps_ms))
    caplog.set_level(logging.INFO, logger="lightning_feed")
    watching = Watching()
    loaders = plain(batch_size=1, num_workers=1)
    expected_model, _, _ = fit([], loaders, max_epochs=2)
    model, _, error = fit([AutotuneCallback(max_workers=3), watching], loaders, max_epochs=2)
    assert error is None
    assert set(watching.seen[0]) == {0, 1}
    assert watching.last == [expected] * 2
    assert "would not tell" in own_lines(caplog)[0]
    assert "training itself took 10 ms a step with num_workers=1" in own_lines(caplog)[-1]
    assert model.events == expected_model.events
    again = Watching()
    fit([AutotuneCallback(max_workers=3), again], loaders, max_epochs=1)
    assert (again.seen[0][0] == 0) == (expected == 0)  # remembered, where it gained


class Keeps(Numbers):
    """Reads each sample slowly, and only once."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            time.sleep(0.002)
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


def test_trials_wait_for_the_second_epoch_of_a_dataset_that_keeps_what_it_reads(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_tuning, "rehearsal_of", goal_file.rehearsal_of)

    def loaders() -> dict[str, Any]:
        return {"train_dataloaders": DataLoader(Keeps(60), batch_size=2, shuffle=True)}

    callback = AutotuneCallback(max_workers=3)
    _, _, error = fit([callback], loaders, max_epochs=3)
    assert error is None
    assert [(move.epoch, move.setting.num_workers) for move in callback.moves] == [(1, 3)]


def test_no_workers_are_not_compared_where_an_epoch_cannot_change_its_loader(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.steps_s = {0: 0.001, 1: 0.09}
    monkeypatch.setattr(search, "UNLIKE", 1.25)
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: 10.0)
    watching = Watching()
    callback = AutotuneCallback(max_workers=3)
    fit([callback, watching], plain(batch_size=1, num_workers=1, in_order=False), max_epochs=2)
    assert callback.moves == ()
    assert watching.last == [1, 1]


def test_the_next_run_starts_with_the_setting_found_earlier(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    fit([AutotuneCallback(max_workers=3)], plain(), max_epochs=2)
    tried = len(trials.settings)
    caplog.set_level(logging.INFO, logger="lightning_feed")
    watching = Watching()
    fit([AutotuneCallback(max_workers=3), watching], plain(), max_epochs=2)
    assert len(trials.settings) == tried
    assert watching.seen[0] == [3] * 6
    assert "an earlier run found: the fastest of 4 tried" in own_lines(caplog)[-1]
    (kept,) = (cache_folder() / "tuning").iterdir()
    assert json.loads(kept.read_text())["tuned"]["setting"]["num_workers"] == 3


@pytest.mark.parametrize(
    ("steps_ms", "kept"),
    [
        pytest.param([8.5], 3, id="as before"),
        pytest.param([20.0, 10.0], 1, id="slower now"),
        pytest.param([4.0, 3.0], 1, id="both are faster now"),
        pytest.param([20.0, 30.0], 3, id="both are slower now"),
    ],
)
def test_a_remembered_setting_is_compared_if_its_steps_take_another_time(
    steps_ms: list[float],
    kept: int,
    trials: Trials,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    caplog.set_level(logging.INFO, logger="lightning_feed")
    loaders = plain(batch_size=1, num_workers=1)
    expected, _, _ = fit([], loaders, max_epochs=2)
    for times_ms in ([10.0, 8.0], steps_ms):
        left_ms = iter(times_ms)
        monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run, left_ms=left_ms: next(left_ms))
        watching = Watching()
        changed, _, error = fit([AutotuneCallback(max_workers=3), watching], loaders, max_epochs=2)
        assert error is None
        assert by_hook(changed.events) == by_hook(expected.events)
        assert all(map(torch.equal, changed.parameters(), expected.parameters()))
    assert watching.seen[0][0] == 3
    assert (1 in watching.seen[0]) is (len(steps_ms) > 1)
    assert watching.last == [kept] * 2
    kept_now = [json.loads(file.read_text())["tuned"] for file in (cache_folder() / "tuning").iterdir()]
    assert kept in {tuned["setting"]["num_workers"] for tuned in kept_now}
    if len(steps_ms) > 1:
        compares, goes = own_lines(caplog)[-2:]
        took = f"a step takes {steps_ms[0]:.3g} ms, and took 8 when this was found"
        assert compares.endswith(f"training itself compares num_workers=1, prefetch_factor=2, {took}.")
        assert f"{'goes back to' if kept == 3 else 'keeps'} num_workers={kept}" in goes


def test_a_fit_that_soon_ends_keeps_a_remembered_setting(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison takes 20 steps with a setting that may be much slower."""
    loaders = plain(batch_size=1, num_workers=1)
    fit([AutotuneCallback(max_workers=3)], loaders, max_epochs=1)
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    monkeypatch.setattr(fit_tuning, "_STEPS_LEFT", 21)
    watching = Watching()
    steps_ms = iter([20.0])
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: next(steps_ms))
    fit([callback := AutotuneCallback(max_workers=3), watching], loaders, max_epochs=1)
    assert list(steps_ms) == []
    assert watching.last == [3]
    assert len(callback.moves) == 1


def test_a_remembered_setting_that_training_has_not_compared_is_compared_now(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first fit ends before its comparison does."""
    caplog.set_level(logging.INFO, logger="lightning_feed")
    loaders = plain(batch_size=1, num_workers=1)
    fit([AutotuneCallback(max_workers=3)], loaders, max_epochs=1)
    tried = len(trials.settings)
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    steps_ms = iter([20.0, 10.0])
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: next(steps_ms))
    watching = Watching()
    fit([AutotuneCallback(max_workers=3), watching], loaders, max_epochs=1)
    assert len(trials.settings) == tried
    assert (watching.seen[0][0], watching.seen[0][-1]) == (3, 1)
    assert "this was not seen in training yet" in own_lines(caplog)[-2]


def test_steps_that_fill_a_cache_are_not_compared_with_those_of_an_earlier_fit(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders = plain(batch_size=1, num_workers=1)
    fit([AutotuneCallback(max_workers=3)], loaders, max_epochs=2)
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    monkeypatch.setattr(fit_tuning, "mean_step_ms", None)
    monkeypatch.setattr(fit_tuning, "fills_a_cache", lambda *_: True)
    watching = Watching()
    fit([AutotuneCallback(max_workers=3), watching], loaders, max_epochs=2)
    assert {number for epoch in watching.seen for number in epoch} == {3}


def test_steps_without_a_time_are_not_compared(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is far behind, times of steps come later. Until then training goes on with what it has."""
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    monkeypatch.setattr(fit_tuning, "MEASURED_STEPS", MEASURED - 20)
    loaders = plain(batch_size=1, num_workers=1)
    for times_ms in ([10.0, None, 8.0], [None, 20.0, None, 10.0]):
        left_ms = iter(times_ms)
        monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run, left_ms=left_ms: next(left_ms))
        watching = Watching()
        fit([AutotuneCallback(max_workers=3), watching], loaders, max_epochs=2)
        assert list(left_ms) == []
    assert (watching.seen[0][0], watching.last[0]) == (3, 1)


def test_what_training_compared_beside_busy_programs_is_not_remembered(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_tuning, "OtherPrograms", lambda: QuietMachine(30.0))
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", MEASURED - 20)
    steps_ms = iter([10.0, 30.0])
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: next(steps_ms))
    watching = Watching()
    fit([AutotuneCallback(max_workers=3), watching], plain(batch_size=1, num_workers=1), max_epochs=2)
    assert watching.last == [1] * 2
    (kept,) = (cache_folder() / "tuning").iterdir()
    tuned = json.loads(kept.read_text())["tuned"]
    assert (tuned["setting"]["num_workers"], tuned["trained_ms"]) == (3, None)  # that of the trials, to be compared


def test_a_fit_does_not_begin_with_the_result_of_the_command(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trials have no batches in place, and the fits that prove it are not this one."""
    monkeypatch.setattr(tune_command, "REPLAY_STEPS", 30)
    monkeypatch.setattr(tune_command, "prove", lambda *_, **__: None)
    monkeypatch.setattr(tune_command, "OtherPrograms", QuietMachine)
    monkeypatch.setattr(goal_file, "read_machine", read_machine)  # the command reads this machine, too
    loaders = plain(num_workers=1)
    found = tune_command.tune(loaders()["train_dataloaders"], model=Recording(), trainer=quiet_trainer([]))
    assert found.setting.num_workers == 3
    report = GPUStarvationCallback(report=False)
    fit([report], loaders)
    facts = report.report().measurements.facts.trainer
    assert (facts.tuned, facts.tuned_outside) == (True, True)
    tried = len(trials.settings)
    fit([AutotuneCallback(max_workers=3)], loaders, max_epochs=2)
    assert len(trials.settings) > tried


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("my train.py", "lightning-feed tune 'my train.py'"),
        ("-m birds.train", "lightning-feed tune -m birds.train"),
        ("notebook", "lightning_feed.tune(loader)"),
    ],
)
def test_a_fit_that_ends_within_a_minute_gets_a_sentence_instead_of_trials(
    program: str, command: str, trials: Trials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report_file, "read_program", lambda: program)
    monkeypatch.setattr(time_left, "LEAST_S", 60.0)
    monkeypatch.setattr(fit_tuning, "rehearsal_of", None)  # nor a rehearsal
    caplog.set_level(logging.INFO, logger="lightning_feed")
    fit([callback := AutotuneCallback(max_workers=3)], plain(), max_epochs=2)
    assert (callback.moves, trials.settings) == ((), [])
    (line,) = own_lines(caplog)
    assert "the fit ends in about" in line
    assert f"`{command}` tries settings outside of it" in line


def test_a_budget_of_the_user_is_used_in_a_short_fit_too(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "LEAST_S", 60.0)
    fit([callback := AutotuneCallback(max_workers=3, budget_s=20.0)], plain(), max_epochs=2)
    assert [move.setting.num_workers for move in callback.moves] == [3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": 4}, (5 + 3 * 6, 3)),
        ({"max_epochs": -1}, (math.inf, math.inf)),
        ({"max_epochs": -1, "max_steps": 9}, (8, 1)),
        ({"max_epochs": 4, "max_steps": 4, "accumulate_grad_batches": 2}, (8, 1)),
        ({"max_epochs": 1}, (5, 0)),
        ({"max_epochs": 2, "limit_train_batches": 3}, (2 + 3, 1)),
    ],
)
def test_steps_and_epochs_left_are_those_that_follow(options: dict[str, Any], expected: tuple[float, float]) -> None:
    left: list[tuple[float, float]] = []

    def ended(trainer: Any, *_: Any) -> None:
        if not left:
            left.append(_host.steps_left(trainer))
        trainer.should_stop = True

    fit([LambdaCallback(on_train_batch_end=ended)], plain(), **options)
    assert left == [expected]


def test_a_time_limit_of_the_trainer_is_known(trials: Trials) -> None:
    left: list[float] = []
    started = LambdaCallback(on_train_start=lambda trainer, _: left.append(_host.seconds_left(trainer)))
    fit([started], plain(), max_epochs=1)
    fit([started], plain(), max_epochs=1, max_time={"seconds": 50})
    assert left[0] == math.inf
    assert 0 < left[1] <= 50


def test_a_fit_that_is_too_short_is_not_tuned(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_tuning, "MEASURED_STEPS", 20)
    fit([callback := AutotuneCallback(max_workers=3)], plain(), max_epochs=2)
    assert (callback.moves, trials.settings) == ((), [])


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", 100_000])
def test_invalid_max_workers_are_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match="max_workers="):
        AutotuneCallback(max_workers=value)


@pytest.mark.parametrize("value", [0, -1.0, float("inf")])
def test_invalid_budgets_are_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match="budget_s="):
        AutotuneCallback(budget_s=value)


def test_reloaded_loaders_get_the_tuned_setting(trials: Trials) -> None:
    watching = Watching()
    expected, _, _ = fit([], module(num_workers=1), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    callbacks = [AutotuneCallback(max_workers=3), watching]
    changed, _, error = fit(callbacks, module(num_workers=1), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert error is None
    assert watching.last == [3] * 3 or watching.last[1:] == [3] * 2
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))


RELOADED = [
    "plain",
    "plain, its batch sampler draws at once",
    "plain, no workers",
    "ours, no workers, a sampler without a length",
    "ours, persistent, background",
    "ours, in an order",
]
"""Loaders that the gate makes anew in each epoch."""


@pytest.mark.parametrize("finds", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", in_gate([name for name in LOADERS if name != "plain, persistent, seeded"], RELOADED))
def test_loaders_of_later_epochs_keep_the_order_of_samples(*, name: str, finds: bool, trials: Trials) -> None:
    """Lightning makes their iterators twice, and drops the first ones.

    One kind is left out: its epochs here are so short that three workers draw the end of a dropped pass.
    """
    options: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    if not finds:
        trials.steps_s = dict.fromkeys(range(4), 0.01)
    expected, _, _ = fit([], LOADERS[name], **options)
    changed, _, error = fit([callback := AutotuneCallback(max_workers=3)], LOADERS[name], **options)
    assert error is None
    assert len(callback.moves) == finds
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))


@pytest.mark.parametrize(
    "name", ["plain, no workers", pytest.param("ours, no workers, seeded", marks=pytest.mark.nightly)]
)
def test_loaders_of_later_epochs_yield_all_batches_after_a_failure(
    name: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(fit_tuning, "mean_step_ms", fail)
    options: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    expected, _, _ = fit([], LOADERS[name], **options)
    changed, _, error = fit([AutotuneCallback(max_workers=3)], LOADERS[name], **options)
    assert error is None
    assert by_hook(changed.events) == by_hook(expected.events)


@pytest.mark.parametrize("hook", ["on_train_start", pytest.param("on_train_epoch_start", marks=pytest.mark.nightly)])
def test_hooks_of_later_epochs_may_iterate_the_loader(hook: str, trials: Trials) -> None:
    counts: list[int] = []

    def look(trainer: Any, _: Any) -> None:
        counts.append(sum(1 for _ in trainer.train_dataloader))

    looking = LambdaCallback(**{hook: look})
    options: dict[str, Any] = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    model, trainer, _ = fit([AutotuneCallback(max_workers=3), looking], plain(), **options)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, **plain()())
    assert counts == [6] * (4 if hook == "on_train_epoch_start" else 2)


@pytest.mark.parametrize("name", ["plain, no workers", "plain, its batch sampler draws at once"])
def test_the_loader_of_a_second_fit_keeps_the_order_of_samples(name: str, trials: Trials) -> None:
    """Which goes on after the epochs of the first one."""

    def trained_twice(callbacks: list[Callback]) -> Any:
        model, trainer, _ = fit(callbacks, LOADERS[name], max_epochs=1)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, **LOADERS[name]())
        return model

    torch.manual_seed(1)
    expected = trained_twice([])
    torch.manual_seed(1)
    changed = trained_twice([AutotuneCallback(max_workers=3)])
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))


def test_a_second_fit_forgets_the_moves_of_the_first(trials: Trials) -> None:
    callback = AutotuneCallback(max_workers=3)
    model, trainer, _ = fit([callback], plain(), max_epochs=2)
    assert len(callback.moves) == 1
    trainer.fit_loop.max_epochs = 3
    trials.steps_s = {0: 0.1, 1: 0.1}
    trainer.fit(model, **plain(batch_size=2)())
    assert callback.moves == ()


def test_a_second_autotune_callback_does_nothing(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed.callbacks.autotune")
    first = AutotuneCallback(max_workers=3)
    second = AutotuneCallback()
    fit([first, second], plain(), max_epochs=1)
    assert (len(first.moves), len(second.moves)) == (1, 0)
    assert own_lines(caplog)[0] == "AutotuneCallback does nothing: another AutotuneCallback is at work."


# --- the host ---------------------------------------------------------------------------------------------------------


def test_real_trials_leave_the_run_and_the_trainer_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which setting is found is left to chance."""
    monkeypatch.setattr(fit_tuning, "MEASURED_STEPS", MEASURED - 20)
    loaders = plain(num_workers=1)
    expected, trainer, _ = fit([], loaders, max_epochs=3)
    callback = AutotuneCallback(max_workers=2, budget_s=3)
    same, our_trainer, error = fit([callback], loaders, max_epochs=3)
    assert error is None
    assert by_hook(same.events) == by_hook(expected.events)
    assert all(map(torch.equal, same.parameters(), expected.parameters()))
    assert vars(our_trainer.profiler).keys() == vars(trainer.profiler).keys()
    assert "process_dataloader" not in vars(our_trainer.strategy)


def test_the_callback_can_be_pickled_and_deep_copied() -> None:
    callback = AutotuneCallback(max_workers=3)
    assert copy.deepcopy(callback).max_workers == pickle.loads(pickle.dumps(callback)).max_workers == 3


def test_a_failing_trial_leaves_the_loader_unchanged_and_is_logged(
    trials: Trials, caplog: pytest.LogCaptureFixture
) -> None:
    trials.steps_s = {**THREE_ARE_BEST, 0: DatasetError("Loading from the dataset failed: planted.")}
    watching = Watching()
    _, _, error = fit([AutotuneCallback(max_workers=3), watching], plain(num_workers=1), max_epochs=2)
    assert error is None
    assert watching.last == [1] * 2
    assert "could not tune the training loader (lightning_feed.errors.DatasetError: Loading" in caplog.text
    assert "planted" in caplog.text


def test_the_profiler_is_unwrapped_after_an_error() -> None:
    class Fails(Recording):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.current_epoch == 1:
                raise ValueError("planted")
            return super().training_step(batch, batch_idx)

    _, plain_trainer, _ = fit([], plain())
    _, trainer, error = fit([AutotuneCallback()], plain(), Fails)
    assert "planted" in str(error)
    assert vars(trainer.profiler).keys() == vars(plain_trainer.profiler).keys()


def test_a_run_killed_after_a_move_resumes_exactly(tmp_path: Path, trials: Trials) -> None:
    """In the epoch with two loaders, and in the next."""
    loaders = module(num_workers=1, persistent_workers=True)
    options: dict[str, Any] = {"max_epochs": 3}
    whole = run(loaders, [], **options)
    path = tmp_path / "killed.ckpt"
    for step in (MEASURED + 1, 6 + 2):
        callback = AutotuneCallback(max_workers=3)
        before = run(loaders, [callback, SaveThenDie("on_train_batch_end", step, path)], **options)
        after = run(loaders, [AutotuneCallback(max_workers=3)], ckpt_path=path, **options)
        assert before == whole[: len(before)]
        assert after == whole[len(before) :]


@pytest.mark.parametrize("step", [MEASURED + 2, *(pytest.param(step, marks=pytest.mark.nightly) for step in (5, 23))])
def test_a_run_killed_within_the_epoch_of_a_move_resumes_exactly(step: int, tmp_path: Path, trials: Trials) -> None:
    """Other workers yield the rest of the epoch, and the checkpoint has their position."""
    options: dict[str, Any] = {"max_epochs": 2}

    def loaders() -> dict[str, Any]:
        return {"datamodule": Birds(1, loader=LoaderSettings(num_workers=1))}

    whole = run(loaders, [], **options)
    path = tmp_path / "killed.ckpt"
    callback = AutotuneCallback(max_workers=3)
    before = run(loaders, [callback, SaveThenDie("on_train_batch_end", step, path)], **options)
    assert len(callback.moves) == 1
    after = run(loaders, [], ckpt_path=path, **options)
    assert before == whole[: len(before)]
    assert after == whole[len(before) :]


@pytest.mark.parametrize("name", ["ours, no workers, seeded", "ours, in an order", "datamodule"])
def test_an_epoch_that_ends_with_the_move_is_followed_by_a_new_one(name: str, trials: Trials) -> None:
    """The rest of the epoch yields nothing, and the next epoch does not begin where the rest would."""
    options: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": MEASURED}
    expected, _, _ = fit([], LOADERS[name], **options)
    changed, _, error = fit([callback := AutotuneCallback(max_workers=3)], LOADERS[name], **options)
    assert error is None
    assert len(callback.moves) == 1
    assert by_hook(changed.events) == by_hook(expected.events)


# --- two ranks --------------------------------------------------------------------------------------------------------


def fit_on_a_rank(rank: int) -> Any:
    import warnings

    warnings.simplefilter("ignore")
    made = make_up_trials(setattr)
    fit_tuning.fills_a_cache = lambda *_: False  # type: ignore[assignment]  # a busy machine reads at any speed
    watching = Watching()
    callback = AutotuneCallback(max_workers=3)
    torch.manual_seed(0)
    model = Recording()
    trainer = quiet_trainer([callback, watching], devices=2, strategy="ddp", max_epochs=3, use_distributed_sampler=True)
    trainer.fit(model, DataLoader(Numbers(SAMPLES), 2, shuffle=True))
    moves = [(move.epoch, move.setting.num_workers) for move in callback.moves]
    return {"last": watching.last, "moves": moves, "trained": trained(model), "trials": len(made.settings)}


def test_ranks_make_the_same_moves(tmp_path: Path) -> None:
    """One runs the trials, and both use their result."""
    first, second = in_ranks(2, fit_on_a_rank, tmp_path)
    assert first["moves"] == second["moves"] == [[0, 3]]
    assert first["last"] == second["last"] == [3, 3, 3]
    assert first["trials"] > 0
    assert second["trials"] == 0
    assert len(first["trained"]) == len(second["trained"])


def two_fits_on_a_rank(rank: int) -> Any:
    """The second begins with the result of the first. Its steps take longer on one rank only."""
    import warnings

    warnings.simplefilter("ignore")
    make_up_trials(setattr)
    fit_tuning.fills_a_cache = lambda *_: False  # type: ignore[assignment]
    fit_tuning.PROVING_STEPS = MEASURED - 20
    seen = []
    moves = []
    for times_ms in ([10.0, 8.0], [8.0, 10.0] if rank == 0 else [20.0, 10.0]):
        left_ms = iter(times_ms)
        fit_tuning.mean_step_ms = lambda run, left_ms=left_ms: next(left_ms)  # type: ignore[misc]
        watching = Watching()
        callback = AutotuneCallback(max_workers=3)
        torch.manual_seed(0)
        options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": True}
        trainer = quiet_trainer([callback, watching], max_epochs=2, **options)
        trainer.fit(Recording(), DataLoader(Numbers(2 * SAMPLES), 2, shuffle=True))
        seen.append(watching.last)
        moves.append([move.setting.num_workers for move in callback.moves])
        assert list(left_ms) == []
    return {"last": seen, "moves": moves}


def test_ranks_compare_a_remembered_setting_together(tmp_path: Path) -> None:
    first, second = in_ranks(2, two_fits_on_a_rank, tmp_path)
    assert first == second
    assert first["moves"] == [[3], [3, 0]]
    assert first["last"] == [[3, 3], [0, 0]]


def recalled_on_a_node(rank: int, found: list[int], own: int, now_ms: float) -> Any:
    """A fit that begins with a result of this node, which steps of 8 ms have proven."""
    import warnings

    warnings.simplefilter("ignore")
    make_up_trials(setattr)
    fit_tuning.fills_a_cache = lambda *_: False  # type: ignore[assignment]
    fit_tuning.PROVING_STEPS = MEASURED - 20
    steps_ms = iter([now_ms, 30.0])
    fit_tuning.mean_step_ms = lambda run: next(steps_ms)
    before = workers(own)
    earlier = Tuned(setting=workers(found[rank]), own=before, reason="", trials=(), trained_ms=(10.0, 8.0))
    fit_tuning.Store.may_know = lambda *_: True  # type: ignore[method-assign]
    fit_tuning.Store.load = lambda *_: replace(earlier, remembered=True)  # type: ignore[method-assign]
    watching = Watching()
    options: dict[str, Any] = {"devices": 1, "num_nodes": 2, "strategy": "ddp", "use_distributed_sampler": True}
    trainer = quiet_trainer([AutotuneCallback(max_workers=3), watching], max_epochs=2, **options)
    trainer.fit(Recording(), DataLoader(Numbers(120), 2, shuffle=True, num_workers=own))
    return {"last": watching.last, "left": len(list(steps_ms))}


@pytest.mark.parametrize(
    ("found", "own", "now_ms", "last"),
    [
        ([3, 1], 1, 80.0, [1, 1]),
        ([3, 0], 0, 80.0, [0, 0]),
        pytest.param([3, 1], 1, 8.0, [3, 1], marks=pytest.mark.nightly),
        pytest.param([3, 2], 1, 80.0, [1, 1], marks=pytest.mark.nightly),
    ],
)
def test_nodes_that_remember_different_settings_compare_them_together(
    found: list[int], own: int, now_ms: float, last: list[int], tmp_path: Path
) -> None:
    """Their loaders have different queues, and one may have nothing to compare."""
    seen = in_ranks(2, recalled_on_a_node, tmp_path, found, own, now_ms, nodes=True)
    assert [node["last"] for node in seen] == [[number] * 2 for number in last]
    assert [node["left"] for node in seen] == [1 if now_ms == 8.0 else 0] * 2


# --- where it changes nothing -----------------------------------------------------------------------------------------


class Curriculum(Numbers):
    """Samples that depend on a value that the program sets."""

    level = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 100 * self.level


class SetsEpoch(Curriculum):
    def set_epoch(self, epoch: int) -> None:
        self.level = epoch


class Teaches(Callback):
    """Changes the dataset when an epoch begins, the first one included."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        (loader,) = _host.train_loaders(trainer)
        loader.dataset.level = trainer.current_epoch + 1


CHANGING: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(Curriculum(SAMPLES), BATCH, shuffle=True),
    "set_epoch": lambda: DataLoader(SetsEpoch(SAMPLES), BATCH, shuffle=True),
    "its sampler draws at once": lambda: DataLoader(Curriculum(SAMPLES), BATCH, sampler=DrawsAtOnce()),
    "ours": lambda: FeedLoader(Curriculum(SAMPLES), batch_size=BATCH, shuffle=True),
}


@pytest.mark.parametrize(
    "is_first_run",
    [pytest.param(True, id="tuned now"), pytest.param(False, id="tuned before", marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("name", in_gate(list(CHANGING), ["set_epoch", "ours"]))
def test_tuned_workers_see_dataset_changes_made_between_epochs(name: str, is_first_run: bool, trials: Trials) -> None:
    """Workers that were found earlier have begun when the first epoch does."""

    def loaders() -> dict[str, Any]:
        return {"train_dataloaders": CHANGING[name]()}

    expected, _, _ = fit([Teaches()], loaders, max_epochs=3)
    callback = AutotuneCallback(max_workers=3)
    if not is_first_run:
        fit([Teaches(), callback], loaders, max_epochs=2)
    watching = Watching()
    same, _, error = fit([Teaches(), callback, watching], loaders, max_epochs=3)
    assert error is None
    assert watching.last == [3] * 3
    assert by_hook(same.events) == by_hook(expected.events)
    assert all(map(torch.equal, same.parameters(), expected.parameters()))


def test_a_change_of_the_dataset_before_a_comparison_ends_is_seen(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers that stay have started before the change."""
    monkeypatch.setattr(fit_tuning, "PROVING_STEPS", 36)
    steps_ms = iter([100.0, 30.0])
    monkeypatch.setattr(fit_tuning, "mean_step_ms", lambda run: next(steps_ms))
    data = Curriculum(60)

    def change(trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 1):
            data.level = 1

    callback = AutotuneCallback(max_workers=3)
    callbacks = [callback, LambdaCallback(on_train_batch_end=change)]
    fit(callbacks, lambda: {"train_dataloaders": DataLoader(data, 1, shuffle=True)}, max_epochs=3)
    assert list(steps_ms) == []
    assert [move.setting.num_workers for move in callback.moves] == [3, 0]


def test_prefetched_batches_see_dataset_changes_made_between_epochs(trials: Trials) -> None:
    def loaders() -> dict[str, Any]:
        return {"train_dataloaders": CHANGING["plain"]()}

    callbacks = [Teaches(), AutotuneCallback(max_workers=3), NullStreamPrefetch(), GPUStarvationCallback(report=False)]
    expected, _, _ = fit([Teaches()], loaders)
    for _ in range(2):
        same, _, error = fit(callbacks, loaders)
        assert error is None
        assert by_hook(same.events)["training_step"] == by_hook(expected.events)["training_step"]


@pytest.mark.parametrize("persists", [True, False])
def test_workers_stay_alive_only_if_those_of_the_user_do(*, persists: bool, trials: Trials) -> None:
    pids: list[set[int]] = []

    class Notes(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pids.append({child.pid or 0 for child in multiprocessing.active_children()})

    own = plain(num_workers=1, persistent_workers=True) if persists else plain()
    fit([AutotuneCallback(max_workers=3), Notes()], own, max_epochs=3)
    assert [len(each) for each in pids[1:]] == [3] * 2
    assert (pids[1] == pids[2]) is persists


def test_the_users_own_workers_see_the_same_changes_as_without_tuning(trials: Trials) -> None:
    """Those of a first epoch never do: Lightning starts them before the hooks of the epoch."""

    def loaders() -> dict[str, Any]:
        return {"train_dataloaders": DataLoader(Curriculum(SAMPLES), BATCH, num_workers=1)}

    trials.steps_s = {0: 0.1, 1: 0.03}
    expected, _, _ = fit([Teaches()], loaders, max_epochs=3)
    for _ in range(2):
        same, _, _ = fit([Teaches(), AutotuneCallback(max_workers=3)], loaders, max_epochs=3)
        assert by_hook(same.events) == by_hook(expected.events)


def test_a_data_module_with_num_workers_tune_runs_the_trials(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    expected, _, _ = fit([], module(seed=3), max_epochs=2)
    watching = Watching()
    same, trainer, error = fit([watching], module(num_workers="tune", seed=3), max_epochs=2)
    assert error is None
    (callback,) = [tuner for tuner in trainer.callbacks if isinstance(tuner, AutotuneCallback)]
    assert [move.setting.num_workers for move in callback.moves] == [3]
    assert watching.last[-1] == 3
    assert by_hook(same.events) == by_hook(expected.events)
    assert all(map(torch.equal, same.parameters(), expected.parameters()))
    assert len(own_lines(caplog)) == 1


def test_num_workers_tune_uses_the_users_own_callback(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    mine = AutotuneCallback(max_workers=2)
    _, trainer, error = fit([mine], module(num_workers="tune"), max_epochs=2)
    assert error is None
    assert [callback for callback in trainer.callbacks if isinstance(callback, AutotuneCallback)] == [mine]
    assert max(setting.num_workers for setting in trials.settings) == 2
    assert "does nothing" not in caplog.text


def test_num_workers_tune_without_a_trainer_falls_back_to_auto(trials: Trials) -> None:
    data = Birds(BATCH, loader=LoaderSettings(num_workers="tune"))
    assert len([*data.train_dataloader()]) == SAMPLES // BATCH
    assert trials.settings == []
    as_auto = Birds(BATCH)
    as_auto.train_dataloader()
    assert data.recommendations["train"].setting == as_auto.recommendations["train"].setting


class Batches:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 4)] * 3)


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


ASIDE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "iterable": (lambda: {"train_dataloaders": DataLoader(Stream(SAMPLES), BATCH, num_workers=1)}, "is a stream"),
    "several": (
        lambda: {"train_dataloaders": [DataLoader(Numbers(8), 2), DataLoader(Numbers(8), 2)]},
        "2 training loaders",
    ),
    "no DataLoader": (lambda: {"train_dataloaders": Batches()}, "(Batches) is not a DataLoader"),
    "its own way": (lambda: {"train_dataloaders": OwnWay(Numbers(8), 2)}, "OwnWay"),
    "stateful": (lambda: {"train_dataloaders": StatefulDataLoader(Numbers(8), 2)}, "StatefulDataLoader"),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13 and later
@pytest.mark.parametrize(("loaders", "why"), ASIDE.values(), ids=list(ASIDE))
def test_unsupported_loaders_are_left_untuned_with_one_log_line(
    loaders: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed.callbacks.autotune")
    expected, _, _ = fit([], loaders, max_epochs=2)
    callback = AutotuneCallback()
    same, _, error = fit([callback], loaders, max_epochs=2)
    assert error is None
    assert callback.moves == ()
    (line,) = own_lines(caplog)
    assert "does nothing" in line
    assert why in line
    assert by_hook(same.events) == by_hook(expected.events)
    assert all(map(torch.equal, same.parameters(), expected.parameters()))
