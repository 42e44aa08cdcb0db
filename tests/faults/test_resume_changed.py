"""A run that is resumed in the middle of an epoch with something changed: exact, or refused with what changed."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from recording import Numbers, WritesPerRank
from resuming import SaveThenDie, run
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.errors import ResumeError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder, facts_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*using the device under current context"),
]


def loaders(samples: int, ranks: int, size: int, *, shuffle: bool = True, **options: Any) -> list[FeedLoader]:
    """The loader of each rank, as Lightning would have made them."""
    made = []
    for rank in range(ranks):
        data = range(samples)
        sampler: Any = RandomSampler(data) if shuffle else SequentialSampler(data)
        if ranks > 1:
            sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=5)
        order = EpochOrder(seed=3, epoch=lambda: 2)
        made.append(FeedLoader(data, batch_size=size, sampler=sampler, order=order, **options))
    return made


def steps(ranks: list[FeedLoader], count: int | None = None) -> tuple[list[int], dict[str, Any]]:
    """What ``count`` steps train, in the order of the whole epoch, and the state of rank 0 after them."""
    passes = [iter(loader) for loader in ranks]
    trained: list[int] = []
    while count is None or count > 0:
        batches = [next(one, None) for one in passes]
        if batches[0] is None:
            break
        rows = [batch.tolist() for batch in batches]
        assert len({len(row) for row in rows}) == 1, "a rank with fewer samples would keep the others waiting"
        trained += [sample for together in zip(*rows, strict=True) for sample in together]
        count = None if count is None else count - 1
    state = ranks[0].state_dict()
    for one in passes:
        one.close()
    return trained, state


@pytest.mark.parametrize("seed", range(60))
def test_each_sample_is_trained_once_whatever_changes(seed: int) -> None:
    draw = random.Random(seed)
    samples, shuffle = draw.randint(30, 90), draw.random() < 0.7
    trained: list[int] = []
    state, most = None, 1
    for part in range(draw.randint(2, 4)):
        ranks, size = draw.randint(1, 3), draw.randint(1, 9)
        most = max(most, ranks)
        now = loaders(samples, ranks, size, shuffle=shuffle)
        if state is not None:
            for loader in now:
                loader.load_state_dict(state)
        had, state = steps(now, draw.randint(0, 3) if part == 0 else draw.randint(1, 2))
        trained += had
    most = max(most, ranks := draw.randint(1, 3))
    last = loaders(samples, ranks, draw.randint(1, 9), shuffle=shuffle)
    for loader in last:
        loader.load_state_dict(state)
    had, state = steps(last)
    trained += had
    assert state["batches"] == len(last[0]), "Lightning would not see the end of this epoch"
    assert sorted(trained[:samples]) == list(range(samples))
    assert len(trained) - samples < most  # repeated, so that all ranks have as many


def test_another_length_is_refused_in_mid_epoch_and_welcome_at_its_end() -> None:
    _, state = steps(loaders(400, 1, 8), 10)
    (grown,) = loaders(440, 1, 8)
    with pytest.raises(ResumeError, match=r"440 samples instead of 400.*end of an epoch"):
        grown.load_state_dict(state)
    grown.load_state_dict({**state, "batches": 0, "pass_start": {}})
    assert sorted(steps([grown])[0]) == list(range(440))


def test_what_cannot_be_carried_over_is_refused() -> None:
    def weighted(ranks: int) -> FeedLoader:
        sampler: Any = WeightedRandomSampler([1.0] * 40, 40)
        return FeedLoader(range(40), sampler=DistributedSampler(range(40), ranks) if ranks > 1 else sampler)

    class Pairs:
        batch_size = 2

        def __init__(self, size: int) -> None:
            self.batch_size = size

        def __iter__(self) -> Any:
            return iter([[i, i + 1] for i in range(0, 40, self.batch_size)])

        def __len__(self) -> int:
            return 40 // self.batch_size

    _, state = steps([weighted(1)], 2)
    with pytest.raises(ResumeError, match="2 ranks instead of 1"):
        FeedLoader(range(40), sampler=DistributedSampler(range(40), 2, 0)).load_state_dict(state)
    with pytest.raises(ResumeError, match=r"the sampler RandomSampler, .* instead of WeightedRandomSampler"):
        FeedLoader(range(40), shuffle=True).load_state_dict(state)
    _, state = steps([FeedLoader(range(40), batch_sampler=Pairs(2))], 2)
    with pytest.raises(ResumeError, match=r"batch_size=4 instead of 2.*Pairs"):
        FeedLoader(range(40), batch_sampler=Pairs(4)).load_state_dict(state)
    _, state = steps(loaders(9, 1, 2), 4)
    with pytest.raises(ResumeError, match="too few for a batch of 3 with drop_last=True"):
        loaders(9, 1, 3, drop_last=True)[0].load_state_dict(state)
    _, state = steps(loaders(9, 1, 2), 2)
    with pytest.raises(ResumeError, match="side by side"):
        loaders(9, 1, 3)[0].load_state_dict({**state, "beside": 1})


def test_a_sampler_of_another_kind_comes_with_the_next_epoch(caplog: pytest.LogCaptureFixture) -> None:
    whole, _ = steps(loaders(40, 1, 8))
    before, state = steps(loaders(40, 1, 8), 2)
    (sequential,) = loaders(40, 1, 8, shuffle=False)
    sequential.load_state_dict(state)
    assert "the sampler SequentialSampler, BatchSampler instead of RandomSampler, BatchSampler" in caplog.text
    assert before + steps([sequential])[0] == whole


def test_states_without_the_configuration_are_refused() -> None:
    _, state = steps(loaders(40, 1, 8), 2)
    for name in (*facts_of(loaders(40, 1, 8)[0], {}), "since", "done"):
        del state[name]
    with pytest.raises(ResumeError, match="Resume from another checkpoint"):
        loaders(40, 1, 8)[0].load_state_dict(state)


class Data(FastDataModule):
    def __init__(self, samples: int, size: int, *, validate: bool = True) -> None:
        self.validate = validate
        super().__init__(batch_size=size, loader=LoaderSettings(num_workers=0, seed=4))
        self.samples = samples

    def make_dataset(self, split: str) -> Any:
        return (
            Numbers(self.samples)
            if split == "train"
            else Numbers(2, first=1000)
            if self.validate and split == "val"
            else None
        )


def flat(batches: list[Any]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


class Epochs(Callback):
    """Counts the epochs that Lightning saw to their end, and validated."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.validations = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validations += not trainer.sanity_checking


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_train_batch_start"])
@pytest.mark.parametrize("size", [2, 4, 6])
def test_in_a_fit_with_another_batch_size(size: int, moment: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    before = flat(run(lambda: {"datamodule": Data(30, 4)}, [SaveThenDie(moment, 3, path)], max_epochs=2))
    epochs = Epochs()
    after = flat(run(lambda: {"datamodule": Data(30, size)}, [epochs], max_epochs=2, ckpt_path=path))
    assert sorted(before + after) == sorted([*range(30)] * 2)
    assert sorted(after[-30:]) == list(range(30))
    assert epochs.validations == 2
    assert epochs.batches[-1] + 1 == -(-30 // size)


class StopAfter(SaveThenDie):
    """Every rank saves; then training ends without an error, because a raising rank would take the other one along."""

    def _reach(self, moment: str, trainer: Any) -> None:
        if moment == self.moment and self.left == 0:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
        self.left -= moment == self.moment


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_in_a_fit_with_other_ranks(ranks: tuple[int, int], tmp_path: Path) -> None:
    def go(name: str, devices: int, extra: list[Callback], **options: Any) -> list[int]:
        folder = tmp_path / name
        folder.mkdir()
        strategy = {"strategy": "ddp_fork", "devices": devices, "accelerator": "cpu"} if devices > 1 else {}
        run(
            lambda: {"datamodule": Data(30, 4, validate=False)},
            [*extra, WritesPerRank(str(folder))],
            **{"max_epochs": 1, **strategy, **options},
        )
        return [sample for rank in range(devices) for sample in flat(torch.load(folder / f"rank{rank}.pt")["seen"])]

    path = tmp_path / "run.ckpt"
    before = go("before", ranks[0], [StopAfter("on_train_batch_end", 1, path)])
    assert len(before) == 2 * 4 * ranks[0]
    after = go("after", ranks[1], [], ckpt_path=path)
    assert sorted(before + after) == list(range(30))
