"""A loader state is read as a whole or refused as a whole, and the end of an epoch is a place like any other."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import Numbers
from resuming import SaveThenDie, run
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.errors import LoaderError, ResumeError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


class Data(FastDataModule):
    def __init__(self, samples: int, size: int, sampler: Callable[[], Any] = lambda: None, **loader: Any) -> None:
        self.samples, self.make_sampler = samples, sampler
        super().__init__(size, loader=LoaderSettings(**{"num_workers": 0, "seed": 4, **loader}))

    def make_dataset(self, split: str) -> Any:
        return {"train": Numbers(self.samples), "val": Numbers(2, first=1000)}.get(split)

    def sampler(self, dataset: Any, split: str) -> Any:
        return self.make_sampler() if split == "train" else None


def flat(batches: list[Any]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def go(data: Data, *callbacks: Any, **options: Any) -> list[int]:
    return flat(run(lambda: {"datamodule": data}, list(callbacks), **{"max_epochs": 2, **options}))


# --- the end of an epoch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("then", [(400, 20), (800, 40), (22, 3)])
def test_the_epoch_after_an_end_of_epoch_checkpoint_is_complete(
    moment: str, then: tuple[int, int], tmp_path: Path
) -> None:
    """With more batches in it, Lightning's count of the old epoch would cut it short, or train part of that again."""
    path = tmp_path / "run.ckpt"
    ended = 9 if moment == "on_train_batch_end" else 0
    go(Data(400, 40), SaveThenDie(moment, ended, path))
    after = go(Data(*then), ckpt_path=path)
    assert sorted(after) == list(range(then[0]))


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_a_sampler_with_its_own_generator_resumes_at_the_end_of_an_epoch(moment: str, tmp_path: Path) -> None:
    def data() -> Data:
        generator = torch.Generator().manual_seed(6)
        return Data(24, 4, lambda: WeightedRandomSampler([1.0, 2.0] * 12, 24, generator=generator))

    whole = go(data(), max_epochs=4)
    for epoch in range(3):
        path = tmp_path / f"{epoch}.ckpt"
        go(data(), SaveThenDie(moment, 6 * epoch + 5 if moment == "on_train_batch_end" else epoch, path), max_epochs=4)
        assert go(data(), max_epochs=4, ckpt_path=path) == whole[24 * (epoch + 1) :]


@pytest.mark.parametrize("validated", [True, False])
def test_an_epoch_cut_by_max_steps_is_completed_after_resuming(validated: bool, tmp_path: Path) -> None:
    limit_val = {"limit_val_batches": 1.0 if validated else 0.0}
    whole = go(Data(24, 4), max_epochs=3, **limit_val)
    path = tmp_path / "run.ckpt"
    before = go(Data(24, 4), SaveThenDie("on_train_epoch_end", 1, path), max_epochs=-1, max_steps=9, **limit_val)
    assert before + go(Data(24, 4), ckpt_path=path, max_epochs=3, **limit_val) == whole
    assert before + go(Data(24, 4), ckpt_path=path, max_epochs=-1, max_steps=18, **limit_val) == whole


# --- states that say nothing, or something else -----------------------------------------------------------------------


def checkpoint(path: Path, data: Data, moment: str = "on_train_batch_end", count: int = 2) -> dict[str, Any]:
    go(data, SaveThenDie(moment, count, path))
    return torch.load(path, weights_only=False)  # type: ignore[no-any-return]


def states(loaded: dict[str, Any]) -> list[dict[str, Any]]:
    return loaded["loops"]["fit_loop"]["state_dict"]["combined_loader"]  # type: ignore[no-any-return]


def test_a_checkpoint_without_a_loader_state_is_refused_inside_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    loaded = checkpoint(path, Data(24, 4))
    del loaded["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(loaded, path)
    with pytest.raises(ResumeError, match="middle of an epoch without the state of the training loader"):
        go(Data(24, 4), ckpt_path=path)
    for moment in ("on_validation_end", "on_train_epoch_end"):
        loaded = checkpoint(path, Data(24, 4), moment, 0)
        del loaded["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        torch.save(loaded, path)
        assert sorted(go(Data(24, 4), ckpt_path=path)) == list(range(24))


def test_ckpt_path_last_without_a_checkpoint_trains_from_the_start(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there is no last checkpoint"):
        trained = go(Data(24, 4), ckpt_path="last", max_epochs=1, default_root_dir=tmp_path)
    assert sorted(trained) == list(range(24))


class Careless(Sampler[int]):
    """Draws from Python's generator, which no checkpoint holds."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return iter(random.sample(range(24), 24))


@pytest.mark.parametrize("options", [{}, {"background": 2}, {"num_workers": 2}], ids=str)
def test_resuming_a_sampler_that_draws_another_order_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    random.seed(1)
    go(Data(24, 4, Careless), SaveThenDie("on_train_batch_end", 2, path))
    with pytest.raises(ResumeError, match="does not repeat the order that it had before"):
        run(lambda: {"datamodule": Data(24, 4, Careless, **options)}, [], ckpt_path=path, seed=8)


VALUES = [None, True, -1, 0, 10**6, 2**70, 1.5, "x", b"", [], {}, [1], {"a": 1}, torch.zeros(3), float("nan")]


def mutations(state: dict[str, Any], draw: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
    made = []
    for _ in range(count):
        mutant = copy.deepcopy(state)
        place: Any = mutant
        while True:
            # Another seed or epoch is no contradiction: later epochs have it, too.
            keys = set(place) - {"epoch"} if isinstance(place, dict) else range(len(place))
            key = draw.choice(sorted(keys))
            if isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.5:
                place = place[key]
                continue
            break
        what = draw.choice(["removed", *VALUES])
        if isinstance(what, str) and what == "removed":
            del place[key]
        else:
            place[key] = what
        made.append((f"{key!r}: {what!r}", mutant))
    return made


@pytest.mark.parametrize("kind", ["random", "weighted"])
def test_a_corrupted_loader_state_is_refused_or_changes_nothing(kind: str) -> None:
    """200 changes: none raises anything else, and none trains a sample twice or leaves one out."""

    def make() -> FeedLoader:
        order = EpochOrder(seed=3, epoch=lambda: 2)
        generator = torch.Generator().manual_seed(6)
        sampler: Any = RandomSampler(range(40))
        if kind == "weighted":
            sampler = WeightedRandomSampler([1.0] * 40, 40, generator=generator)
        return FeedLoader(range(40), batch_size=4, sampler=sampler, order=order)

    loader = make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = [str(batch.tolist()) for batch in batches]
    refused = 0
    for what, mutant in mutations(state, random.Random(kind), 100):
        try:
            resumed = make()
            resumed.load_state_dict(mutant)
            again = [str(batch.tolist()) for batch in resumed]
        except (ResumeError, LoaderError):
            refused += 1
            continue
        assert again == rest, what
    assert refused > 50


def test_a_loader_state_with_fewer_batches_than_lightning_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    early = states(checkpoint(path, Data(24, 4), count=0))
    loaded = checkpoint(path, Data(24, 4), count=2)
    loaded["loops"]["fit_loop"]["state_dict"]["combined_loader"] = early
    torch.save(loaded, path)
    with pytest.raises(ResumeError, match="was changed after it was written"):
        go(Data(24, 4), ckpt_path=path)
