"""Where AutotuneCallback changes nothing: the fit is that without it, and one line says why."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import Numbers, Stream, by_hook, fit
from scripted_starvation import STARVED, Scripted, own_lines
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_feed.autotune_callback import AutotuneCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
SAMPLES, BATCH = 24, 4


class Batches:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 4)] * 3)


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


ASIDE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "iterable": (lambda: {"train_dataloaders": DataLoader(Stream(SAMPLES), BATCH, num_workers=1)}, "is iterable"),
    "several": (
        lambda: {"train_dataloaders": [DataLoader(Numbers(8), 2), DataLoader(Numbers(8), 2)]},
        "2 training loaders",
    ),
    "no DataLoader": (lambda: {"train_dataloaders": Batches()}, "is no DataLoader"),
    "its own way": (lambda: {"train_dataloaders": OwnWay(Numbers(8), 2)}, "OwnWay"),
    "stateful": (lambda: {"train_dataloaders": StatefulDataLoader(Numbers(8), 2)}, "StatefulDataLoader"),
    "a dataset that no worker can use": (lambda: {"train_dataloaders": DataLoader(Only(), 2)}, "a worker process"),
}


class Only(Numbers):
    """As one that holds what belongs to the training process."""

    def __init__(self) -> None:
        super().__init__(8)

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("wrong process")
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13 and later
@pytest.mark.parametrize(("loaders", "why"), ASIDE.values(), ids=list(ASIDE))
def test_it_stands_aside_and_says_so_once(loaders: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed.autotune_callback")
    expected, _, _ = fit([], loaders, max_epochs=4)
    autotune = AutotuneCallback()
    same, _, error = fit([Scripted(STARVED), autotune], loaders, max_epochs=4)
    assert error is None
    assert autotune.moves == ()
    (said,) = own_lines(caplog)
    assert "stands aside" in said
    assert why in said
    assert by_hook(same.events) == by_hook(expected.events)
    assert all(map(torch.equal, same.parameters(), expected.parameters()))
