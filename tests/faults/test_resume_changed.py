"""A run that is resumed in mid-epoch with something changed is refused, with what changed and what to do."""

from pathlib import Path
from typing import Any

import pytest
from recording import Numbers, Stream
from resuming import SaveThenDie, run
from torch.utils.data import SequentialSampler

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.errors import ResumeError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*using the device under current context"),
]


class Data(FastDataModule):
    def __init__(
        self, samples: int = 30, size: int = 4, *, stream: bool = False, sequential: bool = False, **loader: Any
    ) -> None:
        super().__init__(batch_size=size, loader=LoaderSettings(**{"num_workers": 0, "seed": 4, **loader}))
        self.samples = samples
        self.stream = stream
        self.sequential = sequential

    def sampler(self, dataset: Any, split: str) -> Any:
        return SequentialSampler(dataset) if self.sequential else None

    def make_dataset(self, split: str) -> Any:
        if split == "val":
            return Numbers(2, first=1000)
        if split != "train":
            return None
        return Stream(self.samples) if self.stream else Numbers(self.samples)


def flat(batches: list[Any]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_train_batch_start"])
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {"size": 2}, "this run has batch_size=2 instead of 4"),
        ({}, {"samples": 40}, "a dataset of 40 samples instead of 30"),
        ({}, {"samples": 40, "size": 2}, "40 samples instead of 30 and batch_size=2 instead of 4"),
        ({}, {"sequential": True}, "the sampler SequentialSampler, BatchSampler instead of RandomSampler"),
        ({}, {"stream": True}, "StatefulDataLoader"),
        ({"stream": True}, {"stream": True}, "StatefulDataLoader"),
        ({"stream": True}, {}, "StatefulDataLoader"),
    ],
)
def test_resuming_changed_or_streamed_data_in_mid_epoch_is_refused(
    moment: str, before: dict[str, Any], after: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    run(lambda: {"datamodule": Data(**before)}, [SaveThenDie(moment, 3, path)], max_epochs=2)
    with pytest.raises(ResumeError, match=words) as refused:
        run(lambda: {"datamodule": Data(**after)}, [], max_epochs=2, ckpt_path=path)
    assert "saved at the end of an epoch" in str(refused.value)


@pytest.mark.parametrize("moment", ["on_train_epoch_end", "on_validation_end"])
@pytest.mark.parametrize("after", [{"size": 2}, {"samples": 40}, {"sequential": True}, {"stream": True}])
def test_changed_data_after_an_epoch_end_checkpoint_is_trained_whole(
    moment: str, after: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    run(lambda: {"datamodule": Data()}, [SaveThenDie(moment, 0, path)], max_epochs=2)
    trained = flat(run(lambda: {"datamodule": Data(**after)}, [], max_epochs=2, ckpt_path=path))
    assert sorted(trained) == list(range(after.get("samples", 30)))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_resuming_in_mid_epoch_with_another_number_of_ranks_is_refused(ranks: tuple[int, int], tmp_path: Path) -> None:
    def go(devices: int, extra: list[Any], **options: Any) -> None:
        strategy = {"strategy": "ddp_fork", "devices": devices, "accelerator": "cpu"} if devices > 1 else {}
        run(lambda: {"datamodule": Data()}, extra, max_epochs=1, limit_val_batches=0, **strategy, **options)

    path = tmp_path / "run.ckpt"
    go(ranks[0], [StopAfter("on_train_batch_end", 1, path)])
    with pytest.raises(Exception, match=f"{ranks[1]} ranks instead of {ranks[0]}"):  # torch wraps what a rank raises
        go(ranks[1], [], ckpt_path=path)


class StopAfter(SaveThenDie):
    """Every rank saves; then training ends without an error, because a raising rank would take the other one along."""

    def _reach(self, moment: str, trainer: Any) -> None:
        if moment == self.moment and self.left == 0:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
        self.left -= moment == self.moment
