"""A run of FastDataModule that is killed and resumed trains exactly the samples that an unbroken run does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from recording import NullStreamPrefetch, Numbers, Recording, Stream, quiet_trainer
from resuming import Killed, SaveThenDie, assert_resumes_exactly, run
from torch.utils.data import DataLoader, Dataset, SequentialSampler, WeightedRandomSampler

from lightning_feed import FastDataModule, LoaderSettings

SAMPLES = 15
BATCH = 2  # eight batches, the last of one sample


class Data(FastDataModule):
    def __init__(self, kind: str = "map", **loader: Any) -> None:
        super().__init__(batch_size=BATCH, loader=LoaderSettings(**loader))
        self.kind = kind

    def make_dataset(self, split: str) -> Any:
        if split == "val" and self.kind == "validated":
            return Numbers(3, first=1000)
        if split != "train":
            return None
        return {
            "stream": lambda: Stream(SAMPLES),
            "dict": lambda: {"long": Numbers(SAMPLES), "short": Numbers(6, first=100)},
        }.get(self.kind, lambda: Numbers(SAMPLES))()

    def sampler(self, dataset: Dataset[Any], split: str) -> Any:
        if self.kind == "in order":
            return SequentialSampler(dataset)
        return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES) if self.kind == "weighted" else None


def data(*args: Any, **kwargs: Any) -> Any:
    return lambda: {"datamodule": Data(*args, **kwargs)}


def no_callbacks() -> list[Callback]:
    return []


def prefetching() -> list[Callback]:
    return [NullStreamPrefetch()]


@pytest.mark.parametrize(
    ("callbacks", "background", "shuffle"),
    [
        pytest.param(no_callbacks, 0, False, marks=pytest.mark.nightly),
        (no_callbacks, 2, True),
        (prefetching, 0, True),
        pytest.param(prefetching, 2, False, marks=pytest.mark.nightly),
    ],
)
def test_map_style_datasets_resume_exactly_in_mid_epoch(
    callbacks: Any, background: int, shuffle: bool, tmp_path: Path
) -> None:
    source = data("map" if shuffle else "in order", num_workers=0, background=background)
    assert_resumes_exactly(source, callbacks, tmp_path / "run.ckpt", count=(0, 7, 10), max_epochs=3)


@pytest.mark.parametrize(("callbacks", "workers"), [(no_callbacks, 0), (prefetching, 2)])
def test_a_stream_resumes_exactly_at_the_end_of_an_epoch(callbacks: Any, workers: int, tmp_path: Path) -> None:
    source = data("stream", num_workers=workers)
    assert_resumes_exactly(source, callbacks, tmp_path / "run.ckpt", moment="on_train_epoch_end", count=(0, 1))


@pytest.mark.parametrize(
    ("moment", "callbacks", "counts"),
    [
        ("on_validation_end", no_callbacks, (0, 3)),
        ("on_validation_end", prefetching, (2,)),
        pytest.param("on_train_epoch_end", no_callbacks, (0,), marks=pytest.mark.nightly),
        ("on_train_epoch_end", prefetching, (1,)),
    ],
)
def test_checkpoints_saved_after_validation_or_an_epoch_resume_exactly(
    moment: str, callbacks: Any, counts: tuple[int, ...], tmp_path: Path
) -> None:
    assert_resumes_exactly(
        data("validated", num_workers=0),
        callbacks,
        tmp_path / "run.ckpt",
        moment=moment,
        count=counts,
        val_check_interval=4,
        max_epochs=3,
    )


class SaveInStep(SaveThenDie):
    """Saves while a batch is in hand, as a SLURM signal or ``OnExceptionCheckpoint`` does."""

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self._reach("on_before_optimizer_step", trainer)


@pytest.mark.parametrize(
    ("moment", "kind", "callbacks"),
    [
        ("on_train_batch_start", "map", no_callbacks),
        ("on_train_batch_start", "stream", prefetching),
        ("on_before_optimizer_step", "map", prefetching),
        ("on_before_optimizer_step", "stream", no_callbacks),
    ],
)
def test_a_batch_whose_step_did_not_end_is_trained_again_after_resuming(
    moment: str, kind: str, callbacks: Any, tmp_path: Path
) -> None:
    """Lightning does not count a batch whose step did not end, so it must not be missing from the loader's state."""
    source = data(kind, num_workers=0)
    whole = run(source, callbacks(), max_epochs=2)
    # First and last batch of the first epoch, first batch of the second. A stream resumes only where an epoch begins.
    for count in (0, 8) if kind == "stream" else (0, 7, 8):
        path = tmp_path / f"{count}.ckpt"
        run(source, [*callbacks(), SaveInStep(moment, count, path)], max_epochs=2)
        assert run(source, callbacks(), ckpt_path=path, max_epochs=2) == whole[count:]


def test_validating_a_checkpoint_leaves_no_loader_state_for_a_new_fit(tmp_path: Path) -> None:
    old = tmp_path / "old.ckpt"
    new = tmp_path / "new.ckpt"
    run(data("stream", num_workers=0), [SaveThenDie("on_train_batch_end", 4, old)])
    model = Recording()
    trainer = quiet_trainer([NullStreamPrefetch(), SaveThenDie("on_train_batch_start", 0, new)])
    trainer.validate(model, DataLoader(Numbers(2), batch_size=2), ckpt_path=old)
    with pytest.raises(Killed):
        trainer.fit(model, datamodule=Data("stream", num_workers=0))
    assert "combined_loader" not in torch.load(new)["loops"]["fit_loop"]["state_dict"]


def test_the_sample_order_comes_from_the_checkpoint_if_no_seed_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ``seed_everything``: each process draws its own seed, and the resumed one must take the first one's."""
    from recording import end_workers
    from resuming import trained

    def go(callbacks: list[Callback], path: Path | None = None) -> list[Any]:
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        model = Recording()
        try:
            quiet_trainer(callbacks).fit(model, datamodule=Data(num_workers=0), ckpt_path=path)
        except Killed:
            end_workers()
        return trained(model)

    path = tmp_path / "run.ckpt"
    before = go([SaveThenDie("on_train_batch_end", 4, path)])
    after = go([], path)
    assert sorted(row[0] for batch in before + after[:3] for row in batch) == list(range(SAMPLES))
