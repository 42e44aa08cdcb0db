"""``num_workers="tune"`` in a fit: what is tuned, once, and that training is as with the same settings."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from recording import quiet_trainer
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.trials import in_fit as tuning_fit
from lightning_feed.trials.in_fit import settled
from lightning_feed.trials.search import Tuned
from lightning_feed.trials.trial import Setting, Trial

TUNE = LoaderSettings(num_workers="tune")
TWO = Setting(num_workers=2, prefetch_factor=3, persistent_workers=True)


class Rows(Dataset[Tensor]):
    """With noise from each of the generators that a user's transforms draw from."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index)) + torch.rand(4) + random.random() + float(np.random.rand())


class Data(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Rows() if split in ("train", "val") else None


class DrawsForItsSampler(Data):
    """Its sampler is made with a random number."""

    def sampler(self, dataset: Any, split: str) -> Any:
        generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        return RandomSampler(dataset, generator=generator) if split == "train" else None


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).pow(2).mean() + 0 * torch.rand(())

    def validation_step(self, batch: Tensor) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Tunes:
    """In the place of tune_loader: goes through the loader, as trials do with loaders like it, and gives a setting."""

    def __init__(self, setting: Setting = TWO) -> None:
        self.setting = setting
        self.loaders: list[Any] = []
        self.goals: list[Any] = []

    def __call__(self, loader: Any, goal: Any, *, store: Any, on_trial: Any) -> Tuned:
        self.loaders.append(loader)
        self.goals.append(goal)
        for _ in loader:
            torch.rand(3), random.random(), np.random.rand()
        trial = Trial(setting=self.setting, batches_per_s=50.0)
        on_trial(trial)
        return Tuned(setting=self.setting, reason="the fastest of 1 tried", trials=(trial,), batches_per_s=50.0)


@pytest.fixture
def tunes(monkeypatch: pytest.MonkeyPatch) -> Tunes:
    made = Tunes()
    monkeypatch.setattr(tuning_fit, "tune_loader", made)
    return made


def weights(data: Any, **options: Any) -> dict[str, Tensor]:
    seed_everything(7, verbose=False)
    model = Line()
    quiet_trainer([], max_epochs=2, **options).fit(model, datamodule=data)
    return {**model.state_dict(), "next": torch.rand(3), "numpy": torch.tensor(np.random.rand())}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Data, DrawsForItsSampler])
@pytest.mark.parametrize("workers", [0, 2])
def test_weights_are_those_of_the_same_settings_given_by_hand(
    kind: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = TWO if workers else Setting(num_workers=0, prefetch_factor=None)
    monkeypatch.setattr(tuning_fit, "tune_loader", Tunes(setting))
    by_hand = LoaderSettings(num_workers=2, prefetch_factor=3, persistent_workers=True)
    given = weights(kind(8, loader=by_hand if workers else LoaderSettings(num_workers=0)), limit_val_batches=0)
    data = kind(8, loader=TUNE)
    assert_same(weights(data, limit_val_batches=0), given)
    assert data.recommendations["train"].num_workers == workers


def test_a_real_tuning_leaves_training_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tuning_fit.Goal
    monkeypatch.setattr(tuning_fit, "Goal", lambda **values: real(**values, budget_s=1, max_trials=2, most_workers=1))
    data = Data(8, loader=TUNE)
    tuned = weights(data, limit_val_batches=0)
    found = data.recommendations["train"]
    given = LoaderSettings(num_workers=found.num_workers)
    assert_same(tuned, weights(Data(8, loader=given), limit_val_batches=0))
    assert found.reasons["num_workers"].startswith("tuned: ")


def test_the_training_loader_is_tuned_once_and_others_are_not(tunes: Tunes) -> None:
    data = Data(8, loader=TUNE)
    for _ in range(2):
        quiet_trainer([], max_epochs=1).fit(Line(), datamodule=data)
    assert len(tunes.loaders) == 1
    assert tunes.goals[0].local_ranks == 1
    assert tunes.goals[0].device_type == "cpu"
    train, val = data.recommendations["train"], data.recommendations["val"]
    assert (train.num_workers, train.prefetch_factor, train.persistent_workers) == (2, 3, True)
    assert train.reasons["num_workers"] == "tuned: the fastest of 1 tried, 50.0 batches/s in the trial"
    assert train.reasons["prefetch_factor"] == "tuned"
    assert "only training loaders" in val.reasons["num_workers"]
    assert val.num_workers >= 1
    assert "train: num_workers=2: tuned" in data.loader_report()


@pytest.mark.parametrize("call", ["fast_dev_run", "validate", "by hand"])
def test_nothing_is_tuned_where_nothing_is_trained(call: str, tunes: Tunes) -> None:
    data = Data(8, loader=TUNE)
    if call == "fast_dev_run":
        quiet_trainer([], fast_dev_run=True).fit(Line(), datamodule=data)
    elif call == "validate":
        quiet_trainer([]).validate(Line(), datamodule=data, verbose=False)
    else:
        data.train_dataloader()
    assert not tunes.loaders
    assert all(isinstance(one.num_workers, int) for one in data.recommendations.values())
    assert "not tuned" in data.loader_report()


def test_given_values_are_kept() -> None:
    tuned = Tuned(setting=TWO, reason="", trials=())
    kept = settled(LoaderSettings(num_workers="tune", prefetch_factor=7, persistent_workers=False, timeout_s=5), tuned)
    assert (kept.num_workers, kept.prefetch_factor, kept.persistent_workers, kept.timeout_s) == (2, 7, False, 5)
    assert kept.pin_memory is False


def test_settings_of_workers_go_where_there_are_none() -> None:
    wished = LoaderSettings(num_workers="tune", in_order=False, timeout_s=5, prefetch_factor=4, start_method="spawn")
    none = settled(wished, Tuned(setting=Setting(num_workers=0, prefetch_factor=None), reason="", trials=()))
    assert (none.num_workers, none.prefetch_factor, none.timeout_s) == (0, "auto", 0)
    one = settled(wished, Tuned(setting=Setting(num_workers=1, prefetch_factor=2), reason="", trials=()))
    assert (one.num_workers, one.in_order, one.start_method) == (1, True, "spawn")
    threads = settled(
        wished, Tuned(setting=Setting(num_workers=3, prefetch_factor=2, workers="thread"), reason="", trials=())
    )
    assert (threads.workers, threads.start_method) == ("thread", None)
