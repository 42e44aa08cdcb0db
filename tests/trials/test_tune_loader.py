"""All of it together: on simulated trials, with a clock of our own, and once on a real loader."""

import errno
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_loaders import SimulatedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from lightning_feed.errors import SettingsError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.machine import Machine
from lightning_feed.storage import system
from lightning_feed.trials import trial as trial_module
from lightning_feed.trials import tune_loader as door
from lightning_feed.trials.search import Goal, Tuned
from lightning_feed.trials.trial import Setting, Trial
from lightning_feed.trials.tune_loader import Store, key_of, tune_loader

MACHINE = Machine(
    usable_cpus=4, cpu_reason="CPUs by decree", available_memory_bytes=2**36, free_shm_bytes=2**34, start_method="fork"
)
LOADER = DataLoader(TensorDataset(torch.zeros(64, 3)), batch_size=4)
IO = SimulatedLoader(cpu_s=0.002, blocked_s=0.05, noise=0)


class Trials:
    """Stands in for trials: simulated, and paid for on the clock."""

    def __init__(self, loader: SimulatedLoader = IO, seconds: float = 3.0) -> None:
        self.loader, self.seconds, self.now = loader, seconds, 0.0
        self.ran: list[Setting] = []
        self.limits: list[Any] = []
        self.copies: list[int] = []
        self.slower = 1.0

    def clock(self) -> float:
        return self.now

    def run(self, loader: Any, setting: Setting, limits: Any, *, copies: int) -> Trial:
        self.ran.append(setting)
        self.limits.append(limits)
        self.copies.append(copies)
        self.now += self.seconds
        trial = self.loader.trial(setting, len(self.ran))
        return replace(trial, batches_per_s=(trial.batches_per_s or 0) / self.slower)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    found = Trials()
    monkeypatch.setattr(door, "run_trial", found.run)
    return found


def tune(trials: Trials, loader: Any = LOADER, goal: Goal | None = None, **options: Any) -> Any:
    return tune_loader(loader, goal, machine=options.pop("machine", MACHINE), clock=trials.clock, **options)


def test_trials_are_told_and_kept(trials: Trials) -> None:
    told: list[Trial] = []
    found = tune(trials, goal=Goal(demand_per_s=50), on_trial=told.append)
    assert tuple(told) == found.trials
    assert found.setting.num_workers == 3
    assert found.starved_pct == 0
    assert found.batch_size == 4
    assert found.demand_per_s == 50
    assert found.seconds == pytest.approx(3 * len(told))
    assert found.settings.num_workers == 3


def test_the_budget_ends_the_search(trials: Trials) -> None:
    trials.seconds = 12.5
    found = tune(trials, goal=Goal(budget_s=13))
    assert len(found.trials) == 1
    assert "the budget of 13 s ended the search" in found.reason
    assert all(limits.max_s <= 13 for limits in trials.limits)


def test_a_result_is_remembered_and_checked(trials: Trials, tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = tune(trials, store=store)
    assert not first.remembered
    ran = len(trials.ran)
    again = tune(trials, store=store)
    assert again.remembered
    assert again.setting == first.setting
    assert len(trials.ran) == ran + 1
    assert len(again.trials) == 1
    assert trials.ran[-1] == first.setting
    tune(trials, store=store, fresh=True)
    assert trials.ran[ran + 1] == Setting(num_workers=0, prefetch_factor=None)


@pytest.mark.parametrize(("slower", "trusted"), [(1.05, True), (1.3, False), (0.7, False)])
def test_a_remembered_result_that_does_not_hold_is_found_anew(
    slower: float, trusted: bool, trials: Trials, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    trials.loader = replace(IO, spread=0.001)
    tune(trials, store=store)
    trials.slower = slower
    assert tune(trials, store=store).remembered is trusted


def test_a_remembered_result_that_no_longer_fits_is_not_run(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    found = tune(trials, store=store)
    assert found.setting.num_workers > 1
    ran = len(trials.ran)
    monkeypatch.setattr(trial_module, "open_files_limit", lambda: trial_module.OTHER_FILES + 6.0)
    tight = tune(trials, store=store)
    assert trials.ran[ran].num_workers == 0
    assert tight.setting.num_workers <= 1
    assert "ulimit -n" in tight.rejected[0][1]


def test_threads_are_offered_for_our_loader_only(trials: Trials) -> None:
    trials.loader = replace(IO, gil_share=0.01)
    tune(trials, FeedLoader(TensorDataset(torch.zeros(64)), batch_size=4))
    assert "thread" in {setting.workers for setting in trials.ran}
    trials.ran.clear()
    tune(trials)
    assert {setting.workers for setting in trials.ran} == {"process"}


def test_local_ranks_share_the_machine(trials: Trials) -> None:
    trials.loader = SimulatedLoader(cpu_s=0.05, cpus=1, noise=0)
    tune(trials, goal=Goal(local_ranks=4))
    assert set(trials.copies) == {4}
    assert max(setting.num_workers for setting in trials.ran) <= 4


class Whole(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(40)


class Divided(Whole):
    """As one of a package whose streams divide themselves."""

    __module__ = "litdata.streaming"

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from range(40) if info is None else range(info.id, 40, info.num_workers)


def test_a_stream_that_would_be_doubled_gets_one_worker_at_most(trials: Trials) -> None:
    found = tune(trials, DataLoader(Whole(), batch_size=4))
    assert max(setting.num_workers for setting in trials.ran) == 1
    assert "may not divide its samples" in found.reason
    tune(trials, DataLoader(Divided(), batch_size=4))
    assert max(setting.num_workers for setting in trials.ran) > 1


class Unpicklable(Dataset[Any]):
    def __init__(self) -> None:
        self.read = lambda index: index

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def test_what_cannot_be_sent_to_workers_gets_none(trials: Trials) -> None:
    spawned = replace(MACHINE, start_method="spawn")
    found = tune(trials, DataLoader(Unpicklable(), batch_size=4), machine=spawned)
    assert found.setting.num_workers == 0
    assert (
        "no worker processes: its dataset cannot be sent to worker processes that are started by 'spawn'"
        in found.reason
    )
    assert len(trials.ran) == 1
    tune(trials, DataLoader(Unpicklable(), batch_size=4))
    assert max(setting.num_workers for setting in trials.ran) > 0
    trials.ran.clear()
    trials.loader = replace(IO, gil_share=0.01)
    tune(trials, FeedLoader(Unpicklable(), batch_size=4), machine=spawned)
    assert {setting.workers for setting in trials.ran if setting.num_workers} == {"thread"}


def test_a_worker_that_died_is_told(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(loader: Any, setting: Setting, limits: Any, **options: Any) -> Trial:
        if setting.num_workers:
            return Trial(setting=setting, infeasible="a worker process (pid 7) died")
        return trials.run(loader, setting, limits, **options)

    monkeypatch.setattr(door, "run_trial", dying)
    found = tune(trials)
    assert found.setting.num_workers == 0
    assert "a worker process (pid 7) died" in found.reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"demand_per_s": 0.0},
        {"demand_per_s": float("inf")},
        {"budget_s": 0.0},
        {"max_trials": 0},
    ],
)
def test_impossible_goals(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="is not possible"):
        Goal(**wrong)


def test_a_real_loader(tmp_path: Path) -> None:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.zeros(64, 3)), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    found = tune_loader(loader, Goal(budget_s=2.0, max_trials=2, most_workers=2), store=Store(tmp_path))
    assert found.setting.num_workers == 0  # nothing to load: processes only cost
    assert (found.batches_per_s or 0) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.multiprocessing.active_children() == []
    assert len(list(tmp_path.iterdir())) == 1


# --- results remembered ----------------------------------------------------------------------------------------------

BIG_MACHINE = replace(MACHINE, usable_cpus=8, available_memory_bytes=2**35, free_shm_bytes=2**33)
SETTING = Setting(num_workers=4, prefetch_factor=2, persistent_workers=True)
TUNED = Tuned(
    setting=SETTING,
    reason="by decree",
    trials=(Trial(setting=SETTING, batches_per_s=12.5, start_s=0.1),),
    rejected=((replace(SETTING, num_workers=9), "too large"),),
    demand_per_s=10.0,
    batches_per_s=12.5,
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


def key(loader: DataLoader[Any], goal: Goal = Goal(), machine: Machine = BIG_MACHINE, version: str = "1") -> str:  # noqa: B008
    return json.dumps(key_of(loader, goal, machine, version), sort_keys=True)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.load(KEY) is None
    store.save(KEY, TUNED)
    assert store.load(KEY) == TUNED
    assert store.load({"what": "else"}) is None
    store.save(KEY, replace(TUNED, reason="anew"))
    assert store.load(KEY) == replace(TUNED, reason="anew")
    assert len(list(store.folder.iterdir())) == 1


OF_0_2 = """{"version": 1, "key": {"what": "ever"}, "tuned": {"setting": {"num_workers": 4, "prefetch_factor": 2,
"workers": "process", "persistent_workers": true, "pin_memory": false, "in_order": true}, "reason": "by decree",
"trials": [{"setting": {"num_workers": 4, "prefetch_factor": 2, "workers": "process", "persistent_workers": true,
"pin_memory": false, "in_order": true}, "batches_per_s": 12.5, "start_s": 0.1, "cpu_s_per_batch": null,
"memory_bytes": null, "batch_bytes": null, "batch_tensors": null, "gap_p99_s": null, "head_of_line_pct": null,
"seconds": 0.0, "infeasible": null}], "rejected": [[{"num_workers": 9, "prefetch_factor": 2, "workers": "process",
"persistent_workers": true, "pin_memory": false, "in_order": true}, "too large"]], "demand_per_s": 10.0,
"batch_size": null, "batches_per_s": 12.5, "starved_pct": null, "options": ["in_order=False"], "remembered": false,
"seconds": 0.0}}"""
"""A file as versions before this one wrote it."""


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(KEY, replace(TUNED, reason="of today"))
    (path,) = tmp_path.iterdir()
    path.write_text(OF_0_2)
    assert store.load(KEY) == TUNED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: "",
        lambda kept: "[1, 2]",
        lambda kept: kept[: len(kept) // 2],
        lambda kept: "\x00\xff" * 20,
        lambda kept: kept.replace('"version": 1', '"version": 0'),
        lambda kept: kept.replace('"ever"', '"never"'),
        lambda kept: kept.replace('"num_workers": 4', '"num_workers": -4'),
        lambda kept: kept.replace('"num_workers": 4', '"num_workers": "4"'),
        lambda kept: kept.replace('"num_workers": 4', '"num_workers": 0'),
        lambda kept: kept.replace('"process"', '"fibre"'),
        lambda kept: kept.replace('"batches_per_s": 12.5', '"batches_per_s": null'),
        lambda kept: kept.replace('"pin_memory"', '"unknown"'),
    ],
)
def test_a_file_that_is_not_ours_is_as_none(spoil: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_a_folder_that_cannot_be_written_is_said_once(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, "refused")

    monkeypatch.setattr(system.tempfile, "mkstemp", refuse)
    with caplog.at_level(logging.INFO, "lightning_feed"):
        Store(tmp_path).save(KEY, TUNED)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "could not be stored" in caplog.text


def scale(sample: Any) -> Any:
    return sample


def test_the_key_holds_what_a_result_depends_on() -> None:
    loader = DataLoader(Numbers(), batch_size=2)
    same = key(loader)
    assert key(DataLoader(Numbers(), batch_size=2)) == same
    others = [
        key(DataLoader(Numbers(), batch_size=3)),
        key(DataLoader(Numbers(11), batch_size=2)),
        key(DataLoader(Numbers(width=4), batch_size=2)),
        key(DataLoader(Numbers(transform=scale), batch_size=2)),
        key(DataLoader(Numbers(transform=torch.nn.ReLU()), batch_size=2)),
        key(DataLoader(Raises(), batch_size=2)),
        key(DataLoader(Numbers(), batch_size=2, collate_fn=scale)),
        key(DataLoader(Subset(Numbers(), range(10)), batch_size=2)),
        key(loader, version="2"),
        key(loader, Goal(demand_per_s=10)),
        key(loader, Goal(demand_per_s=20)),
        key(loader, Goal(local_ranks=2)),
        key(loader, Goal(device_type="cuda")),
        key(loader, Goal(may_persist=False)),
        key(loader, Goal(given=Setting(num_workers=1, prefetch_factor=2))),
        key(loader, Goal(given=Setting(num_workers=1, prefetch_factor=2, pin_memory=True))),
        key(loader, machine=replace(BIG_MACHINE, usable_cpus=4)),
        key(loader, machine=replace(BIG_MACHINE, free_shm_bytes=2**26)),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_the_key_stays_while_things_change_little() -> None:
    loader = DataLoader(Numbers(transform=lambda sample: sample), batch_size=2)
    again = DataLoader(Numbers(transform=lambda sample: sample), batch_size=2)
    assert key(loader) == key(again)  # lambdas lie at other addresses in each run
    assert key(loader, Goal(demand_per_s=10.0)) == key(loader, Goal(demand_per_s=10.1))
    a_little_less = replace(BIG_MACHINE, available_memory_bytes=2**35 + 2**30)
    assert key(loader, machine=a_little_less) == key(loader)
