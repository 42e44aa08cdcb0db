"""What of a fit is not run, what a step is given in its place, and what follows a metric that is not there then."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnosing.small_runs import PACKAGES, make_parts, make_trainer, short_diagnosis
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_feed import GPUStarvationCallback, tune
from lightning_feed.diagnosing import fits, replay
from lightning_feed.diagnosing.fits import _Pace
from lightning_feed.diagnosing.replay import Replay, Sample

pytestmark = [
    # The fits are small on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode"),
]
Module, Data = make_parts()


class Talks(Module):  # type: ignore[misc,valid-type]
    """Needs a logger and its data module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_image("x", batch[0])
        assert self.trainer.datamodule.dataset.length == 24
        return super().training_step(batch, batch_idx)


def test_loggers_callbacks_and_validation_are_left_out_by_name(tmp_path: Path) -> None:
    class Counts(Callback):
        calls = 0

        def on_train_batch_end(self, *args: Any) -> None:
            Counts.calls += 1

    class Validates(Data):  # type: ignore[misc,valid-type]
        def val_dataloader(self) -> Any:
            raise AssertionError("validation is not measured")

    class Brings(Talks):
        def configure_callbacks(self) -> Any:
            return [Counts()]

        def validation_step(self, *_: Any) -> None:
            raise AssertionError("validation is not measured")

    callbacks = [Counts(), GPUStarvationCallback(), ModelCheckpoint(tmp_path, every_n_train_steps=20)]
    options = {"enable_checkpointing": True, "default_root_dir": str(tmp_path), "val_check_interval": 5}
    trainer = make_trainer(logger=CSVLogger(tmp_path), callbacks=callbacks, **options)
    found = short_diagnosis(trainer, Brings(), Validates())
    assert Counts.calls == 0
    assert list(tmp_path.iterdir()) == []
    assert dict(found.measurements.experiments.left_out)["the rest of the fit"].startswith(
        "validation (every 5 steps), ModelCheckpoint (every 20 steps), CSVLogger, Counts.on_train_batch_end: not run, "
    )


def test_callbacks_run_on_request_but_for_the_end_of_a_training() -> None:
    class Own(Callback):
        def __init__(self) -> None:
            self.called: set[str] = set()

        def setup(self, *_: Any, stage: str) -> None:
            self.called.add("setup")

        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.01)
            self.called.add("step")

        def on_train_end(self, *_: Any) -> None:
            called.add("on_train_end")

        on_fit_end = on_save_checkpoint = on_train_end

        def teardown(self, *_: Any, stage: str) -> None:
            called.add("teardown")

    called: set[str] = set()
    own = Own()
    found = short_diagnosis(make_trainer(callbacks=[own]), Module(), Data(), only="X1", callbacks=True)
    assert own.called == set()  # put back
    assert called == set()
    assert found.measurements.hooks[0].name.endswith(".Own.on_train_batch_end")
    assert found.cause == "hooks"
    assert "the rest of the fit" not in dict(found.measurements.experiments.left_out)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_hooks_for_the_end_of_a_training_are_not_called(package: str) -> None:
    PackageModule, PackageData = make_parts(package)
    ends: list[str] = []

    class Uploads(PackageModule):  # type: ignore[misc,valid-type]
        def on_fit_end(self) -> None:
            ends.append("on_fit_end")

        def on_train_end(self) -> None:
            ends.append("on_train_end")

        def teardown(self, stage: str) -> None:
            ends.append("teardown")

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            ends.append("on_save_checkpoint")

    class Cleans(PackageData):  # type: ignore[misc,valid-type]
        def teardown(self, stage: str) -> None:
            ends.append(f"data {stage}")

    short_diagnosis(make_trainer(package), Uploads(), Cleans())
    assert ends == ["data fit"]  # once, as it was set up once


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_rate_that_follows_validation(interval: str, package: str) -> None:
    PackageModule, PackageData = make_parts(package)

    class Detector(PackageModule):  # type: ignore[misc,valid-type]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_map", 0.5)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
            scheduler = {"scheduler": plateau, "monitor": "val_map", "interval": interval, "frequency": 3}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    class Validated(PackageData):  # type: ignore[misc,valid-type]
        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    found = short_diagnosis(make_trainer(package), Detector(), Validated())
    assert found.stats.steps >= 10
    assert found.measurements.experiments.model_per_s > 0
    if interval == "step":
        assert tune(Validated(), model=Detector(), budget_s=1, max_trials=1, fresh=True).demand_per_s > 0


# --- batches of several lengths -----------------------------------------------------------------------------------


class Sentences(Dataset[Any]):
    """Sorted by length, and padded batch by batch."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": torch.zeros(10 + index // 4, dtype=torch.long), "y": torch.tensor(index % 2)}


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([one["ids"] for one in samples], batch_first=True)
    return {"ids": ids, "y": torch.stack([one["y"] for one in samples])}


def test_batches_of_the_lengths_that_the_run_has_are_replayed() -> None:
    lengths: list[list[int]] = []

    class Text(Module):  # type: ignore[misc,valid-type]
        def on_train_start(self) -> None:
            lengths.append([])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            lengths[-1].append(batch["ids"].shape[1])
            return torch.nn.functional.cross_entropy(self.net(batch["ids"][:, :4].float()), batch["y"])

    loader = DataLoader(Sentences(), batch_size=4, collate_fn=pad)
    found = short_diagnosis(make_trainer(), Text(), train_dataloaders=loader)
    run, on_device, from_host = lengths
    measured = run[fits.WARM_UP_STEPS :]
    for replayed in (on_device, from_host):
        again = replayed[: len(replayed) // 8 * 8]
        assert len(set(again)) == 8
        assert sum(again) / len(again) == pytest.approx(sum(measured) / len(measured), rel=0.05)
    experiments = found.measurements.experiments
    assert experiments.model_per_s > 0
    assert experiments.host_batch_per_s > 0


def test_of_batches_that_are_alike_the_first_is_replayed() -> None:
    sample = Sample(skip=2)
    for number in range(100):
        sample.offer(torch.full((2,), number))
    assert [batch.tolist() for batch in sample.take(8)] == [[0, 0]]


def test_a_sample_is_as_the_run_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(skip=10)
    for length in range(10, 1010):
        sample.offer({"x": torch.zeros(length)})
    taken = [len(batch["x"]) for batch in sample.take(4)]
    assert taken == pytest.approx([145, 395, 645, 895], abs=40)
    assert len(sample._batches) <= replay.MOST_KEPT
    monkeypatch.setattr(replay, "MOST_BYTES", 4000)
    small = Sample()
    for length in range(1, 400):
        small.offer(torch.zeros(length))
    assert 1 < len(small._batches) < 8
    assert small._bytes() <= replay.MOST_BYTES


def test_several_batches_come_one_after_the_other() -> None:
    batches = [torch.zeros(1), torch.zeros(2), torch.zeros(3)]
    assert [len(batch) for batch in Replay(batches, 7)] == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rate_of_several_batches_has_all_of_them_equally_often(accumulate: int) -> None:
    pace, now = _Pace(), 0.0
    for step in range(4 * 6):
        now += (0.1, 0.1, 0.1, 0.5)[step % 4]
        pace._stamps.append(now)
    assert pace.per_s(accumulate, 4) == pytest.approx(1 / 0.2)
    pace._stamps = pace._stamps[:9]
    assert pace.per_s(accumulate, 4) is None


# --- batches that cannot be looked into ---------------------------------------------------------------------------


class Closed:
    """Raises on all that is asked of it but the one thing that the step needs."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def to(self, device: Any) -> "Closed":
        return self

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def keys(self) -> Any:
        raise RuntimeError("no keys")

    def __copy__(self) -> Any:
        raise RuntimeError("no copy")

    __deepcopy__ = __iter__ = __getitem__ = __bool__ = None


def test_a_batch_that_raises_on_all_that_is_asked_of_it() -> None:
    class Careful(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch._x).sum()  # type: ignore[no-any-return]

    loader = DataLoader(range(40), batch_size=4, collate_fn=lambda some: Closed(torch.ones(len(some), 4)))  # type: ignore[arg-type]  # a range is a data set
    found = short_diagnosis(make_trainer(), Careful(), train_dataloaders=loader)
    assert found.stats.steps >= 10
    assert "the run as it is gave no batch" in dict(found.measurements.experiments.left_out)["X1"]
