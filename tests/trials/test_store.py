"""What tuning remembers: one file for each key, whole or not at all, and never an error."""

import errno
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_feed.load.machine import Machine
from lightning_feed.storage import system
from lightning_feed.trials.search import Goal, Tuned
from lightning_feed.trials.trial import Setting, Trial
from lightning_feed.trials.tune_loader import Store, key_of

MACHINE = Machine(usable_cpus=8, cpu_reason="", available_memory_bytes=2**35, free_shm_bytes=2**33, start_method="fork")
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


def key(loader: DataLoader[Any], goal: Goal = Goal(), machine: Machine = MACHINE, version: str = "1") -> str:  # noqa: B008
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
    assert "could not be remembered" in caplog.text


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
        key(loader, machine=replace(MACHINE, usable_cpus=4)),
        key(loader, machine=replace(MACHINE, free_shm_bytes=2**26)),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_the_key_stays_while_things_change_little() -> None:
    loader = DataLoader(Numbers(transform=lambda sample: sample), batch_size=2)
    again = DataLoader(Numbers(transform=lambda sample: sample), batch_size=2)
    assert key(loader) == key(again)  # lambdas lie at other addresses in each run
    assert key(loader, Goal(demand_per_s=10.0)) == key(loader, Goal(demand_per_s=10.1))
    a_little_less = replace(MACHINE, available_memory_bytes=2**35 + 2**30)
    assert key(loader, machine=a_little_less) == key(loader)
