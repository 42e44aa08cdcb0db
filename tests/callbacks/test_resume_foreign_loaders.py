"""PrefetchCallback keeps the resume of other people's stateful loaders exact."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from recording import NullStreamPrefetch, Numbers
from resuming import Counting, assert_resumes_exactly
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 under torch 2.15
]


def sized(workers: int) -> dict[str, Any]:
    return {"train_dataloaders": StatefulDataLoader(Numbers(14), batch_size=2, num_workers=workers)}


def unsized(workers: int) -> dict[str, Any]:
    return {"train_dataloaders": StatefulDataLoader(Counting(14), batch_size=2, num_workers=workers)}


def validated(workers: int) -> dict[str, Any]:
    return {**sized(workers), "val_dataloaders": DataLoader(Numbers(2), batch_size=2)}


@pytest.mark.parametrize(("data", "workers", "depth"), [(unsized, 0, 3), (sized, 2, 1)])
def test_prefetched_stateful_loaders_resume_exactly(data: Any, workers: int, depth: int, tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [NullStreamPrefetch(depth=depth)]

    counts = (3, 6) if workers else (0, 5, 6, 9)
    assert_resumes_exactly(lambda: data(workers), callbacks, tmp_path / "run.ckpt", count=counts)


def test_a_checkpoint_saved_in_validation_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(
        lambda: validated(0),
        lambda: [NullStreamPrefetch(depth=2)],
        tmp_path / "run.ckpt",
        moment="on_validation_end",
        count=(0, 1, 2),
        val_check_interval=3,
    )


def test_a_checkpoint_saved_at_the_end_of_an_epoch_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(
        lambda: sized(0),
        lambda: [NullStreamPrefetch()],
        tmp_path / "run.ckpt",
        moment="on_train_epoch_end",
        count=(0,),
    )
