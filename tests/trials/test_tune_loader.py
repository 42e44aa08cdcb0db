"""Tuning a loader: trials until the search or the budget ends, results that are remembered, and one real loader."""

import errno
import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from trial_steps import QuietMachine
from trials.machines import FakeMachine, workers

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.in_fit.goal import name_of_model
from lightning_feed.load.child import Stopped
from lightning_feed.load.rehearsal import Refusal, Rehearsal
from lightning_feed.load.settings import Setting
from lightning_feed.machine import private_files
from lightning_feed.machine.limits import Machine
from lightning_feed.trials import tune_loader as door
from lightning_feed.trials.search import Trial
from lightning_feed.trials.time_left import BLIND_SHARE, GAIN_SHARE, MOST_S, TimeLeft
from lightning_feed.trials.training_work import TrainingWork
from lightning_feed.trials.tune_loader import Goal, Store, Tuned, key_of, tune_loader

MACHINE = Machine(
    usable_cpus=4, cpu_reason="CPUs by decree", available_memory_bytes=2**36, free_shm_bytes=2**34, start_method="fork"
)
LOADER = DataLoader(TensorDataset(torch.zeros(64, 3)), batch_size=4)


class Trials:
    """Trials on a fake machine, which take time on a clock of their own."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.machine = FakeMachine("linear", 4)
        self.seconds = seconds
        self.now_s = 0.0
        self.ranks: list[int] = []
        self.limits: list[Any] = []

    def clock(self) -> float:
        return self.now_s

    def run(self, loader: Any, setting: Setting, work: TrainingWork, limits: Any, *, ranks: int, **_: Any) -> Trial:
        self.ranks.append(ranks)
        self.limits.append(limits)
        self.now_s += self.seconds
        return self.machine.run(setting)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "OtherPrograms", QuietMachine)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    made = Trials()
    monkeypatch.setattr(door, "run_trial", made.run)
    return made


def tune(trials: Trials, loader: Any = LOADER, goal: Goal | None = None, **options: Any) -> Any:
    return tune_loader(loader, goal, machine=options.pop("machine", MACHINE), clock=trials.clock, **options)


def test_tuning_reports_every_trial_and_keeps_it_in_the_result(trials: Trials) -> None:
    finished: list[Trial] = []
    tuned = tune(trials, on_trial=finished.append)
    assert {trial.setting for trial in finished} == {trial.setting for trial in tuned.trials}
    assert tuned.setting.num_workers == 4
    assert tuned.own == workers(0)
    assert tuned.batch_size == 4
    assert tuned.seconds == pytest.approx(len(finished))
    assert tuned.step_s == pytest.approx(0.025)
    assert tuned.in_words(tuned.trial_of(tuned.setting)) == "160 samples/s"


def test_tuning_pins_where_useful_and_makes_no_workers_persistent(trials: Trials) -> None:
    assert tune(trials).setting == workers(4)
    on_gpu = tune(trials, goal=Goal(device_type="cuda")).setting
    assert (on_gpu.persistent_workers, on_gpu.pin_memory) == (False, True)
    persistent = DataLoader(LOADER.dataset, batch_size=4, num_workers=1, persistent_workers=True)
    assert tune(trials, persistent).setting == workers(4, persistent_workers=True)


def test_time_budget_ends_the_search(trials: Trials) -> None:
    trials.seconds = 7.0
    tuned = tune(trials, goal=Goal(budget_s=13))
    assert len(tuned.trials) == 2
    assert "the time ended the search" in tuned.reason


@pytest.mark.parametrize("left_s", [60.0, 120.0, 1e6])
def test_trials_take_no_longer_than_they_can_return(trials: Trials, left_s: float) -> None:
    """A tenth of the time left as long as nothing gains, and half of what a setting saves from then on."""
    trials.seconds = 2.0
    goal = Goal(time_left=TimeLeft(steps=left_s / 0.1, step_s=0.1))
    gaining = tune(trials, goal=goal)
    assert gaining.setting.num_workers
    assert gaining.seconds <= min(MOST_S, max(BLIND_SHARE, GAIN_SHARE * 0.75) * left_s) + trials.seconds
    trials.machine = FakeMachine("bound by a lock", 4, model_s=10.0)
    in_vain = tune(trials, goal=goal)
    assert in_vain.setting == workers(0)
    assert in_vain.seconds <= min(MOST_S, BLIND_SHARE * left_s) + trials.seconds
    if left_s == 120.0:
        assert gaining.seconds > BLIND_SHARE * left_s


@pytest.mark.parametrize(
    ("left", "seconds"),
    [
        (TimeLeft(steps=100, step_s=0.5), 50.0),
        (TimeLeft(steps=100, step_s=0.5, epochs=4, epoch_start_s=2.0, validation_s=3.0), 70.0),
        (TimeLeft(steps=math.inf, step_s=0.5, epochs=math.inf, epoch_start_s=0.0), math.inf),
        (TimeLeft(steps=math.inf, step_s=0.5, limit_s=40.0), 40.0),
    ],
)
def test_the_time_left_is_that_of_steps_starts_and_validations(left: TimeLeft, seconds: float) -> None:
    assert left.seconds == seconds
    assert left.pays_for_trials == (seconds >= 60)


def test_timeout_for_hangs_is_shorter_once_the_speed_is_known(trials: Trials) -> None:
    tune(trials)
    patience = [limits.patience_s for limits in trials.limits]
    assert patience[0] == 60.0
    assert max(patience[1:]) < 10.0


def test_local_ranks_share_the_cpus_of_the_machine(trials: Trials) -> None:
    tune(trials, goal=Goal(local_ranks=4))
    assert set(trials.ranks) == {4}
    assert max(setting.num_workers for setting in trials.machine.tried) <= 4


def test_settings_beyond_the_free_memory_are_not_tried(trials: Trials) -> None:
    small = replace(MACHINE, available_memory_bytes=2**30)  # half of it is room for two workers
    tuned = tune(trials, machine=small)
    assert tuned.setting.num_workers == 2
    assert max(setting.num_workers for setting in trials.machine.tried) == 2
    assert "of free memory" in tuned.reason


class Unpicklable(Dataset[Any]):
    def __init__(self) -> None:
        self.read = lambda index: index

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def test_unpicklable_dataset_gets_zero_workers(trials: Trials) -> None:
    spawned = replace(MACHINE, start_method="spawn")
    tuned = tune(trials, DataLoader(Unpicklable(), batch_size=4), machine=spawned)
    assert tuned.setting.num_workers == 0
    assert "no worker processes: its dataset cannot be sent to worker processes" in tuned.reason
    assert {setting.num_workers for setting in trials.machine.tried} == {0}


def test_dead_worker_is_named_in_the_reason(trials: Trials) -> None:
    trials.machine.most = 0
    tuned = tune(trials)
    assert tuned.setting.num_workers == 0
    assert tuned.reason.endswith("num_workers=1 could not run: it died")


def test_tuning_raises_an_error_if_no_setting_runs(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "run_trial", lambda _, setting, *more, **options: Trial(setting=setting, infeasible="no"))
    with pytest.raises(LoaderError, match="No setting of the loader could be run: num_workers=0: no"):
        tune(trials)


@pytest.mark.parametrize("budget_s", [0.0, -1, float("inf"), float("nan"), "10s", True])
def test_invalid_budgets_are_refused(budget_s: Any) -> None:
    with pytest.raises(SettingsError, match="is not valid"):
        Goal(budget_s=budget_s)


def test_tuning_a_real_loader_without_work_chooses_zero_workers() -> None:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.zeros(64, 3)), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    tuned = tune_loader(loader, Goal(budget_s=4.0, most_workers=1))
    assert tuned.setting.num_workers == 0  # nothing to load: processes only cost
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.multiprocessing.active_children() == []


# --- results remembered ----------------------------------------------------------------------------------------------

BIG_MACHINE = replace(MACHINE, usable_cpus=8, available_memory_bytes=2**35, free_shm_bytes=2**33)
SETTING = Setting(num_workers=4, prefetch_factor=2, persistent_workers=True)
TUNED = Tuned(
    setting=SETTING,
    reason="by decree",
    own=Setting(num_workers=0),
    in_place=replace(SETTING, in_place=True),
    trials=(Trial(setting=SETTING, steps_s=(0.1, 0.2), start_s=0.1),),
    work=TrainingWork(step_s=0.05),
    remembered=True,
)
KEY: dict[str, Any] = {"what": "ever"}


class Numbers(Dataset[Any]):
    def __init__(self, length: int = 10, width: int = 3, transform: Any = None) -> None:
        self.length, self.width, self.transform = length, width, transform

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(self.width)


class Raises(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise OSError("cut short")


def key(
    loader: DataLoader[Any],
    goal: Goal | None = None,
    machine: Machine = BIG_MACHINE,
    rehearsal: Rehearsal = Rehearsal(),  # noqa: B008  # frozen
) -> str:
    return json.dumps(key_of(loader, goal or Goal(), machine, rehearsal), sort_keys=True)


def test_saved_result_is_loaded_by_its_key_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.load(KEY) is None
    store.save(KEY, TUNED)
    assert store.load(KEY) == TUNED
    assert store.load({"what": "else"}) is None
    store.save(KEY, replace(TUNED, reason="anew"))
    assert store.load(KEY) == replace(TUNED, reason="anew")
    assert len(list(store.folder.iterdir())) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: "",
        lambda kept: "[1, 2]",
        lambda kept: kept[: len(kept) // 2],
        lambda kept: "\x00\xff" * 20,
        lambda kept: kept.replace('"pin_memory"', '"unknown"'),
    ],
)
def test_damaged_result_file_is_ignored_and_logged(
    spoil: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    store.save(KEY, TUNED)
    (path,) = tmp_path.iterdir()
    kept = path.read_text()
    assert spoil(kept) != kept
    path.write_text(spoil(kept), encoding="latin-1")
    with caplog.at_level(logging.DEBUG, "lightning_feed"):
        assert store.load(KEY) is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert str(path) in caplog.text


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_unwritable_result_folder_is_logged_once(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, "refused")

    monkeypatch.setattr(private_files.tempfile, "mkstemp", refuse)
    with caplog.at_level(logging.INFO, "lightning_feed"):
        Store(tmp_path).save(KEY, TUNED)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "could not be stored" in caplog.text


def scale(sample: Any) -> Any:
    return sample


def test_result_key_differs_for_every_relevant_change() -> None:
    loader = DataLoader(Numbers(), batch_size=2)
    same = key(loader)
    assert key(DataLoader(Numbers(), batch_size=2)) == same
    others = [
        key(DataLoader(Numbers(), batch_size=3)),
        key(DataLoader(Numbers(11), batch_size=2)),
        key(DataLoader(Numbers(transform=scale), batch_size=2)),
        key(DataLoader(Numbers(transform=torch.nn.ReLU()), batch_size=2)),
        key(DataLoader(Raises(), batch_size=2)),
        key(DataLoader(Numbers(), batch_size=2, collate_fn=scale)),
        key(DataLoader(Subset(Numbers(), range(10)), batch_size=2)),
        key(loader, Goal(work=TrainingWork(step_s=1.0))),
        key(loader, Goal(local_ranks=2)),
        key(loader, Goal(device_type="cuda")),
        key(loader, rehearsal=Rehearsal(fingerprint="of other samples")),
        key(loader, Goal(model=name_of_model(torch.nn.Linear(2, 3)))),
        key(loader, Goal(model=name_of_model(torch.nn.Linear(2, 4)))),
        key(loader, Goal(model=name_of_model(torch.nn.LazyLinear(2)))),  # has no size yet
        key(DataLoader(Numbers(), batch_size=2, num_workers=1)),
        key(loader, machine=replace(BIG_MACHINE, usable_cpus=4)),
        key(loader, machine=replace(BIG_MACHINE, free_shm_bytes=2**26)),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_result_key_is_stable_under_small_changes() -> None:
    loader = DataLoader(Numbers(transform=lambda sample: sample), batch_size=2)
    again = DataLoader(Numbers(transform=lambda sample: sample), batch_size=2)
    assert key(loader) == key(again)  # lambdas lie at other addresses in each run
    works = [TrainingWork(step_s=step_s) for step_s in (0.1, 0.2)]
    assert key(loader, Goal(work=works[0])) == key(loader, Goal(work=works[1]))
    a_little_less = replace(BIG_MACHINE, available_memory_bytes=2**35 + 2**30)
    assert key(loader, machine=a_little_less) == key(loader)


def test_a_refusal_leaves_the_number_of_workers_and_tries_only_batches_in_place(trials: Trials) -> None:
    refused = Rehearsal(refusal=Refusal(reason="past", detail="17", name="dataset.rng"))
    loader = DataLoader(LOADER.dataset, batch_size=4, num_workers=2)
    tuned = tune(trials, loader, Goal(in_slots=True), rehearsal=refused)
    assert {setting.num_workers for setting in trials.machine.tried} == {2}
    assert {setting.in_place for setting in trials.machine.tried} == {True, False}
    assert "sample 17 depends on what was read before it (dataset.rng)" in tuned.reason


@pytest.mark.parametrize("why", ["nothing", "time", "other programs", "turns that disagree"])
def test_a_search_that_was_cut_short_or_disturbed_is_not_whole(
    why: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a whole result is remembered."""
    if why == "other programs":
        monkeypatch.setattr(door, "OtherPrograms", lambda: QuietMachine(30.0))
    if why == "turns that disagree":
        times_s = {0: [0.10, 0.08, 0.08], 1: [0.07, 0.09, 0.07], 2: [0.30]}
        monkeypatch.setattr(
            trials.machine,
            "run",
            lambda setting: Trial(setting=setting, steps_s=(times_s[setting.num_workers].pop(0),)),
        )
    machine = replace(MACHINE, usable_cpus=1)
    tuned = tune(trials, goal=Goal(budget_s=2.0 if why == "time" else 1000.0, most_workers=2), machine=machine)
    assert tuned.whole is (why == "nothing")
    assert tuned.inconclusive is (why == "turns that disagree")
    assert tuned.others_pct == (30.0 if why == "other programs" else 0.0)


def test_the_rehearsal_counts_as_time_of_the_search(trials: Trials) -> None:
    trials.seconds = 7.0
    assert len(tune(trials, goal=Goal(budget_s=21), rehearsal=Rehearsal(seconds=10.0)).trials) == 2
    assert trials.limits[-1].left_s == pytest.approx(4.0)


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        time.sleep(60)
        return index


def test_the_budget_holds_whatever_a_sample_does() -> None:
    began_s = time.monotonic()
    with pytest.raises(LoaderError, match="no trial ended within 1 s"):
        tune_loader(DataLoader(Slow(), batch_size=2), Goal(budget_s=1.0))
    assert time.monotonic() - began_s < 30  # a batch takes two minutes


def test_a_program_that_is_to_stop_ends_the_trials() -> None:
    began_s = time.monotonic()
    with pytest.raises(Stopped):
        tune_loader(DataLoader(Slow(), batch_size=2), Goal(budget_s=100.0), stop=lambda: True)
    assert time.monotonic() - began_s < 30
