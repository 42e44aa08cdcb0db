"""A run of DaliDataModule that is killed and resumed trains exactly the batches that an unbroken run does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from recording import NullStreamPrefetch, Recording, quiet_trainer
from resuming import SaveThenDie, assert_resumes_exactly, run, trained

from lightning_feed.errors import DatasetError, ResumeError

pytest.importorskip("nvidia.dali")

from dali_numbers import DaliNumbers, numbers
from nvidia.dali import fn, types

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
]


def data(folder: Path, **options: Any) -> Any:
    return lambda: {"datamodule": DaliNumbers(folder / "files", noise=True, **options)}


def no_callbacks() -> list[Callback]:
    return []


def prefetching() -> list[Callback]:
    return [NullStreamPrefetch(depth=2)]


@pytest.mark.parametrize(
    ("callbacks", "count"), [(no_callbacks, 0), (prefetching, 3), (no_callbacks, 6), (prefetching, 9)]
)
def test_killed_and_resumed(callbacks: Any, count: int, tmp_path: Path) -> None:
    assert_resumes_exactly(data(tmp_path), callbacks, tmp_path / "run.ckpt", count=count)


@pytest.mark.parametrize("last", ["partial", "drop", "fill"])
def test_with_a_last_batch_that_is_not_whole(last: str, tmp_path: Path) -> None:
    made = data(tmp_path, train=9, batch_size=2, last_batch=last, prefetch=3)
    for count in (3, 4, 6):
        assert_resumes_exactly(made, no_callbacks, tmp_path / "run.ckpt", count=count, max_epochs=3)


def test_killed_before_a_step(tmp_path: Path) -> None:
    """The batch in hand was not trained: it comes again."""
    assert_resumes_exactly(data(tmp_path), no_callbacks, tmp_path / "run.ckpt", moment="on_train_batch_start", count=3)


@pytest.mark.parametrize("callbacks", [no_callbacks, prefetching])
def test_saved_at_the_end_of_an_epoch(callbacks: Any, tmp_path: Path) -> None:
    assert_resumes_exactly(
        data(tmp_path), callbacks, tmp_path / "run.ckpt", moment="on_train_epoch_end", count=0, max_epochs=3
    )


@pytest.mark.parametrize("count", [0, 2])
def test_saved_in_a_validation(count: int, tmp_path: Path) -> None:
    assert_resumes_exactly(
        data(tmp_path, val=4),
        prefetching,
        tmp_path / "run.ckpt",
        moment="on_validation_end",
        count=count,
        val_check_interval=3,
    )


@pytest.mark.parametrize("count", [1, 4])
def test_where_epochs_are_broken_off(count: int, tmp_path: Path) -> None:
    """Each epoch goes on with the samples that the one before left, in the resumed run too."""
    assert_resumes_exactly(
        data(tmp_path), no_callbacks, tmp_path / "run.ckpt", count=count, limit_train_batches=3, max_epochs=3
    )


def test_the_checkpoint_is_plain_and_its_seed_counts(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    whole = run(data(tmp_path), [])
    run(data(tmp_path), [SaveThenDie("on_train_batch_end", 2, path)])
    state = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    assert state["begun"]
    assert state["batches"] == 3
    assert state["checkpoint"].dtype == torch.uint8
    assert run(data(tmp_path), [], seed=8, ckpt_path=path) == whole[3:]


def test_a_checkpoint_after_the_fit(tmp_path: Path) -> None:
    """Lightning counts an epoch that max_steps ended as trained. A resumed run trains the rest of it first."""
    path = tmp_path / "run.ckpt"
    model, trainer = Recording(), quiet_trainer([], max_steps=3)
    trainer.fit(model, datamodule=DaliNumbers(tmp_path / "files"))
    trainer.save_checkpoint(path)
    resumed = Recording()
    quiet_trainer([]).fit(resumed, datamodule=DaliNumbers(tmp_path / "files"), ckpt_path=path)
    trained_before, trained_after = (
        [int(row[0]) for event in one.events if event[0] == "training_step" for row in event[2]]
        for one in (model, resumed)
    )
    assert len(trained_after) == 8 + 14
    assert sorted(trained_before + trained_after[:8]) == list(range(14))


class Sourced(DaliNumbers):
    """The number of each sample, and 1000 times the one that Python makes for it."""

    source: Any
    batch = False

    def pipeline(self, split: str) -> Any:
        read = super().pipeline(split)
        if read is None:
            return None
        return read + 1000 * fn.external_source(self.source, batch=self.batch, dtype=types.FLOAT, ndim=1)


class OfSamples(Sourced):
    @staticmethod
    def source(sample: Any) -> Any:
        return np.float32([sample.idx_in_epoch])


class OfBatches(Sourced):
    batch = True

    @staticmethod
    def source(number: int) -> Any:
        return [np.float32([number])] * 2


@pytest.mark.parametrize(("made", "options"), [(OfSamples, {"limit_train_batches": 3}), (OfBatches, {})])
def test_sources_that_go_by_their_argument(made: type[Sourced], options: dict[str, Any], tmp_path: Path) -> None:
    def sourced() -> Any:
        return {"datamodule": made(tmp_path / "files", train=9, prefetch=3)}

    for count in (2, 5):
        assert_resumes_exactly(sourced, no_callbacks, tmp_path / "run.ckpt", count=count, max_epochs=3, **options)
    counted = {row[0] // 1000 for batch in run(sourced, [], max_epochs=3, **options) for row in batch}
    assert len(counted) >= 9  # it counts on through the epochs


def loader_at(folder: Path, taken: int, **options: Any) -> Any:
    module = DaliNumbers(folder / "files", seed=1, noise=True, **options)
    loader = module.train_dataloader()
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    return loader, batches


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_the_state_is_that_of_the_batch_handed_out(taken: int, tmp_path: Path) -> None:
    """DALI has made more than that by then."""
    loader, batches = loader_at(tmp_path, taken, prefetch=4)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    assert len(rest) == 7 - taken
    resumed, _ = loader_at(tmp_path, 0)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["batches"] == taken
    assert [batch.tolist() for batch in resumed] == rest
    resumed.load_state_dict(state)
    iter(resumed)  # Lightning does so
    assert [batch.tolist() for batch in resumed] == rest
    following = numbers(resumed)
    assert len(following) == 7
    assert following == numbers(loader)


def test_a_state_of_another_loader_is_refused(tmp_path: Path) -> None:
    loader, _ = loader_at(tmp_path, 2)
    state = loader.state_dict()
    for options, said in (
        ({"train": 12}, "samples=14 then and 12 now"),
        ({"batch_size": 3}, "batch_size=2 then and 3"),
    ):
        other, _ = loader_at(tmp_path, 0, **options)
        with pytest.raises(ResumeError, match=said):
            other.load_state_dict(state)
    by_two = {**state, "share": {**state["share"], "ranks": 2}}
    with pytest.raises(ResumeError, match="ranks=2 then and 1 now"):
        loader.load_state_dict({"ranks": [by_two, by_two]})
    with pytest.raises(ResumeError, match="kind 'map'"):
        loader.load_state_dict({**state, "kind": "map"})
    loader.load_state_dict({**state, "checkpoint": torch.full((9,), 255, dtype=torch.uint8), "dali": "0.1"})
    with pytest.raises(DatasetError, match="DALI cannot build what DaliNumbers"):
        next(iter(loader))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_resumed_without_a_state(tmp_path: Path) -> None:
    """A sample was removed, so that the place in the epoch means nothing any more."""
    path = tmp_path / "run.ckpt"
    run(data(tmp_path), [SaveThenDie("on_train_batch_end", 2, path)])
    with pytest.raises(ResumeError, match=r"samples=14 then and 13 now.*resumable=False"):
        run(data(tmp_path, train=13), [], ckpt_path=path)
    rest = run(data(tmp_path, train=13, resumable=False), [], ckpt_path=path)
    assert len(rest) == 4 + 7


def test_without_a_state(tmp_path: Path) -> None:
    loader = DaliNumbers(tmp_path / "files", resumable=False).train_dataloader()
    assert not hasattr(loader, "state_dict")
    assert len(list(loader)) == 7


def test_resumed_by_a_trainer_that_had_another_data_module(tmp_path: Path) -> None:
    made, path = data(tmp_path), tmp_path / "run.ckpt"
    whole, before = run(made, []), run(made, [SaveThenDie("on_train_batch_end", 3, path)])
    trainer, model = quiet_trainer([]), Recording()
    trainer.fit(Recording(), **data(tmp_path, resumable=False)())
    trainer.fit(model, **made(), ckpt_path=path)
    assert trained(model) == whole[len(before) :]
