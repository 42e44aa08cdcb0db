"""Two real ranks that choose a decoder: both take what rank 0 finds, and both hear of it when it fails."""

import json
import os
import re
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from made_samples import jpegs
from recording import quiet_trainer
from torch import Tensor, nn

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.errors import FeedError
from lightning_feed.images import backends
from lightning_feed.images.choose import make_decoder

# The ranks of these tests are forked, as with strategy="ddp_fork".
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")

MOST_S = 120
"""Either rank would else wait for half an hour, until gloo gives up."""


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.labels: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, labels = batch
        self.labels += labels.tolist()
        return nn.functional.cross_entropy(self.layer(pictures.mean((2, 3))), labels % 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight JPEGs in eight classes."""
    for label, data in enumerate(jpegs(8)):
        (tmp_path / "photos" / f"{label}").mkdir(parents=True)
        (tmp_path / "photos" / f"{label}" / "only.jpg").write_bytes(data)
    return tmp_path / "photos"


def in_ranks(photos: Path, how: str) -> list[dict[str, Any]]:
    """What ``fit`` tells of each rank of a run as torchrun starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = torch.multiprocessing.start_processes(
        _one_rank, (port, photos, how), nprocs=2, start_method="fork", join=False
    )
    end = time.monotonic() + MOST_S
    try:
        while not ranks.join(timeout=1):
            assert time.monotonic() < end, "a rank still waits"
    finally:
        for process in ranks.processes:
            process.kill()
    return [json.loads((photos.parent / f"{rank}.json").read_text()) for rank in range(2)]


def _one_rank(rank: int, port: int, photos: Path, how: str) -> None:
    warnings.simplefilter("ignore")  # what there is to hear is heard in the tests of one rank
    torch.set_num_threads(1)
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"},
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        "XDG_CACHE_HOME": str(photos.parent / f"home of {rank}"),
    }
    (photos.parent / f"{rank}.json").write_text(json.dumps(fit(rank, photos, how)))


def fit(rank: int, photos: Path, how: str) -> dict[str, Any]:
    def choose(*args: Any) -> Any:
        """Each rank would find another one the fastest."""
        if how == "no disk":
            assert rank == 0
            raise OSError("the disk is gone")
        return make_decoder(("torchvision", "pillow")[rank])

    root = photos
    if how == "no folder" and rank == 0:
        root = photos.parent / "elsewhere"
    backends.choose_decoder = choose
    model = Small()
    loader = LoaderSettings(num_workers=1, workers="thread", seed=3)
    module = ImageFolderDataModule(root, 4, image_size=16, val_fraction=0.0, loader=loader)
    try:
        quiet_trainer([], devices=2, strategy="ddp", max_epochs=1).fit(model, datamodule=module)
    except (FeedError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    assert module.decoder_choice is not None
    return {"decoder": module.decoder_choice.name, "labels": model.labels}


def test_both_ranks_use_the_decoder_that_rank_0_chooses(photos: Path) -> None:
    first, second = in_ranks(photos, "fine")
    assert first["decoder"] == second["decoder"] == "torchvision"
    assert sorted(first["labels"] + second["labels"]) == list(range(8))


@pytest.mark.parametrize(
    ("how", "own", "told"),
    [
        ("no disk", "OSError: the disk is gone", "LoaderError: Rank 0.* failed: OSError: the disk is gone"),
        ("no folder", "DatasetError: .*elsewhere", "DatasetError: Rank 0.* failed: .*elsewhere"),
    ],
    ids=["disk", "folder"],
)
def test_both_ranks_end_with_the_error_of_rank_0(how: str, own: str, told: str, photos: Path) -> None:
    first, second = in_ranks(photos, how)
    assert "error" in first, first
    assert re.match(own, first["error"])
    assert re.match(told, second["error"])
