"""A full disk when a checkpoint with a loader's state is written: Lightning's error, and nothing left of ours."""

import errno
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import TensorDataset

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings, PrefetchCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*checkpoint directory .* exists and is not empty"),
]


class Numbers(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return TensorDataset(torch.arange(32.0).reshape(32, 1)) if split == "train" else None


class Seen(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].flatten().tolist()
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_error_is_raised_and_the_last_checkpoint_resumes(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, written = LocalFileOpener.commit, list[str]()

    def on_a_full_disk(file: Any) -> None:
        if len(written) == 3:
            Path(file.temp).unlink()
            raise OSError(errno.ENOSPC, "No space left on device", file.path)
        written.append(file.path)
        commit(file)

    def fitted(last: str | None) -> Seen:
        model = Seen()
        own = set(vars(model)) | {"_hparams"}
        keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1)
        logger = CSVLogger(tmp_path)
        logging_own = set(vars(logger))
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", logger=logger, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[GPUStarvationCallback(), PrefetchCallback(), keep],
        )  # fmt: skip
        settings = LoaderSettings(num_workers=workers, seed=1)
        try:
            trainer.fit(model, datamodule=Numbers(4, loader=settings), ckpt_path=last)
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017
            assert len(model.seen) == 16
        assert set(vars(model)) <= own
        assert not {"log_metrics", "save"} & (set(vars(logger)) - logging_own)
        assert not multiprocessing.active_children()
        return model

    threads = set(threading.enumerate())
    with monkeypatch.context() as full:
        full.setattr(LocalFileOpener, "commit", on_a_full_disk)
        broken = fitted(None)
    assert len(broken.seen) == 16  # the error came up in the fourth step, not at the end
    assert sorted(map(str, (tmp_path / "kept").iterdir())) == sorted(written)
    resumed = fitted(written[-1])
    assert sorted(broken.seen[:12] + resumed.seen) == list(range(32))
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()
