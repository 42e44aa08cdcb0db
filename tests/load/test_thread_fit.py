"""FastDataModule with worker threads in a Trainer: the run of num_workers=0, and resumed exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from recording import NullStreamPrefetch, Numbers, Recording, Stream, quiet_trainer
from resuming import assert_resumes_exactly
from torch.utils.data import Dataset, WeightedRandomSampler

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.load.random_state import sample_generator

SAMPLES, BATCH = 15, 2


class Noisy(Numbers):
    """Plus noise from the sample's own generator, as our recipes draw."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(4, generator=sample_generator())


class Data(FastDataModule):
    def __init__(self, kind: str = "map", *, noise: bool = False, **loader: Any) -> None:
        super().__init__(batch_size=BATCH, loader=LoaderSettings(**loader))
        self.kind, self.noise = kind, noise

    def make_dataset(self, split: str) -> Any:
        kind = Noisy if self.noise else Numbers
        if split == "val":
            return kind(5, first=1000) if self.kind == "validated" else None
        if split != "train":
            return None
        return Stream(SAMPLES) if self.kind == "stream" else kind(SAMPLES)

    def sampler(self, dataset: Dataset[Any], split: str) -> Any:
        return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES) if self.kind == "weighted" else None


def fitted(data: Data, callbacks: Any = (), **options: Any) -> tuple[list[Any], list[Any], Any]:
    seed_everything(7, workers=True, verbose=False)
    model = Recording()
    quiet_trainer(list(callbacks), **options).fit(model, datamodule=data)
    weights = [parameter.tolist() for parameter in model.parameters()]
    return model.events, weights, torch.get_rng_state().tolist()


@pytest.mark.parametrize(("kind", "options"), [("map", {"background": 2}), ("weighted", {}), ("validated", {})])
def test_a_fit_with_thread_workers_matches_one_without_workers(kind: str, options: dict[str, Any]) -> None:
    plain = fitted(Data(kind, num_workers=0))
    assert fitted(Data(kind, workers="thread", num_workers=2, **options)) == plain


def test_random_samples_are_independent_of_the_number_of_threads() -> None:
    one, two, seven = (fitted(Data("validated", noise=True, workers="thread", num_workers=n)) for n in (1, 2, 7))
    assert one == two == seven
    assert one[2] == fitted(Data("validated", num_workers=0))[2]


@pytest.mark.parametrize(
    ("callbacks", "background", "count"),
    [
        pytest.param(list, 0, 3, marks=pytest.mark.nightly),
        (list, 2, 7),
        pytest.param(lambda: [NullStreamPrefetch()], 2, 9, marks=pytest.mark.nightly),
        (lambda: [NullStreamPrefetch()], 0, 7),
    ],
)
def test_a_run_with_random_samples_resumes_exactly(callbacks: Any, background: int, count: int, tmp_path: Path) -> None:
    def source() -> dict[str, Any]:
        data = Data("validated", noise=True, workers="thread", num_workers=2, background=background)
        return {"datamodule": data}

    assert_resumes_exactly(source, callbacks, tmp_path / "run.ckpt", count=count, max_epochs=3)
