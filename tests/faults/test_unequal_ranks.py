"""Ranks of unequal length: an error when the fit starts, in place of a hang when the shorter epoch is over."""

import logging
from typing import Any

import pytest
from recording import Numbers
from resuming import run

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.callbacks.exact_resume import check_equal_ranks
from lightning_feed.errors import LoaderError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*using the device under current context"),
]


class Shards(FastDataModule):
    """Rank 1 has fewer samples."""

    def __init__(self) -> None:
        super().__init__(batch_size=2, loader=LoaderSettings(num_workers=0))

    def make_dataset(self, split: str) -> Any:
        return Numbers(12 - 4 * self.trainer.global_rank) if split == "train" else None


def test_two_ranks_of_unequal_length_raise_an_error_instead_of_hanging() -> None:
    with pytest.raises(Exception, match="6 on rank 0, 4 on rank 1"):
        run(
            lambda: {"datamodule": Shards()},
            [],
            strategy="ddp_fork",
            devices=2,
            accelerator="cpu",
            use_distributed_sampler=False,
        )


class Trainer:
    """What is asked of a Trainer."""

    world_size, num_training_batches, max_steps, is_global_zero = 2, 6, -1, True
    callbacks: tuple[Any, ...] = ()


@pytest.mark.parametrize(("other", "max_steps"), [(4, -1), (4, 3), (6, -1), (float("inf"), -1)])
def test_only_unequal_known_lengths_of_ranks_raise_or_warn(
    other: float, max_steps: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gather(lengths: list[Any], own: Any) -> None:
        lengths[:] = [own, other]

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    trainer = Trainer()
    trainer.max_steps = max_steps
    with caplog.at_level(logging.WARNING):
        if (other, max_steps) == (4, -1):
            with pytest.raises(LoaderError, match="limit_train_batches=4"):
                check_equal_ranks(trainer)
        else:
            check_equal_ranks(trainer)
    assert ("would hang" in caplog.text) is (max_steps == 3)
