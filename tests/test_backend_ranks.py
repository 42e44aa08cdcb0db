"""Two real ranks that choose how images are decoded: both do what rank 0 finds, and both hear of it when it fails."""

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
from decode_bound import pretend_gpu, remember
from lightning.pytorch import LightningModule
from made_samples import jpegs
from recording import quiet_trainer
from torch import Tensor, nn

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.data import image_backends
from lightning_feed.data.backend_measurements import BackendMeasurements
from lightning_feed.decode.choose import make_decoder
from lightning_feed.errors import FeedError

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


def in_ranks(photos: Path, how: str, decoder: str = "pillow") -> list[dict[str, Any]]:
    """What ``fit`` tells of each rank of a run as torchrun starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = torch.multiprocessing.start_processes(
        _one_rank, (port, photos, how, decoder), nprocs=2, start_method="fork", join=False
    )
    end = time.monotonic() + MOST_S
    try:
        while not ranks.join(timeout=1):
            assert time.monotonic() < end, "a rank still waits"
    finally:
        for process in ranks.processes:
            process.kill()
    return [json.loads((photos.parent / f"{rank}.json").read_text()) for rank in range(2)]


def _one_rank(rank: int, port: int, photos: Path, how: str, decoder: str) -> None:
    warnings.simplefilter("ignore")  # what there is to hear is heard in the tests of one rank
    torch.set_num_threads(1)
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"},
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        "XDG_CACHE_HOME": str(photos.parent / f"home of {rank}"),
    }
    (photos.parent / f"{rank}.json").write_text(json.dumps(fit(rank, photos, how, decoder)))


def fit(rank: int, photos: Path, how: str, decoder: str) -> dict[str, Any]:
    def broken(*args: Any, **options: Any) -> Any:
        assert rank == 0
        raise OSError("the disk is gone")

    patch = pytest.MonkeyPatch()  # to the end of this process
    pretend_gpu(patch)
    root = photos
    if how == "no folder" and rank == 0:
        root = photos.parent / "elsewhere"
    if how == "no findings":
        BackendMeasurements.load = broken  # type: ignore[method-assign]
    # Each rank would find another one the fastest.
    patch.setattr(
        image_backends,
        "choose_decoder",
        lambda name, *args: make_decoder(("torchvision", "pillow")[rank] if name == "auto" else name),
    )
    if how == "fine" and rank == 0:
        remember(photos, image_size=16)
    model = Small()
    loader = LoaderSettings(num_workers=1, workers="thread", seed=3)
    module = ImageFolderDataModule(
        root, 4, image_size=16, backend="auto", decoder=decoder, val_fraction=0.0, loader=loader
    )
    try:
        quiet_trainer([], devices=2, strategy="ddp", max_epochs=1).fit(model, datamodule=module)
    except (FeedError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    choice, decoder_choice = module.backend_choice, module.decoder_choice
    assert choice is not None
    assert decoder_choice is not None
    names = {"backend": choice.name, "decoder": decoder_choice.name}
    return {**names, "reason": choice.reason, "labels": model.labels}


def test_both_ranks_take_what_rank_0_remembers(photos: Path) -> None:
    first, second = in_ranks(photos, "fine", decoder="auto")
    assert first["backend"] == second["backend"] == "nvjpeg"
    assert first["decoder"] == second["decoder"] == "torchvision"
    assert first["reason"] == second["reason"]
    assert "60 %" in second["reason"]
    assert sorted(first["labels"] + second["labels"]) == list(range(8))
    assert not list((photos.parent / "home of 1").glob("**/images/*.json"))


@pytest.mark.parametrize("decoder", ["auto", "pillow"])
@pytest.mark.parametrize(
    ("how", "own", "told"),
    [
        ("no findings", "OSError: the disk is gone", "LoaderError: Rank 0.* failed: OSError: the disk is gone"),
        ("no folder", "DatasetError: .*elsewhere", "DatasetError: Rank 0.* failed: .*elsewhere"),
    ],
    ids=["findings", "folder"],
)
def test_both_ranks_end_with_the_error_of_rank_0(how: str, own: str, told: str, decoder: str, photos: Path) -> None:
    first, second = in_ranks(photos, how, decoder)
    assert "error" in first, first
    assert re.match(own, first["error"])
    assert re.match(told, second["error"])
