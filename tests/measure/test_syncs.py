"""What makes the host wait for the device, as Lightning is set up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ThroughputMonitor

from lightning_feed import _host
from lightning_feed.measure.measurements import SYNCS


class Model(LightningModule):
    """Logs its loss into the progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).sum()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Ask(Callback):
    """What is known in a running fit, were its device another one."""

    def __init__(self) -> None:
        self.real: tuple[str, ...] = ()
        self.logged: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.real = _host.known_syncs(trainer)
        self.logged = list(trainer.fit_loop.epoch_loop._results.values())


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")  # nothing to load
def test_lightning_records_logged_values_with_their_metadata() -> None:
    ask = Ask()
    trainer = Trainer(callbacks=[ask], max_steps=2, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(Model())
    assert ask.real == ()  # nothing waits for a device where there is none
    assert [(one.meta.prog_bar, one.value.device.type) for one in ask.logged] == [(True, "cpu")]


def _metric(device: str = "cuda", *, prog_bar: bool = True) -> Any:
    return SimpleNamespace(meta=SimpleNamespace(prog_bar=prog_bar), value=SimpleNamespace(device=torch.device(device)))


def _trainer(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "device": "cuda",
        "world_size": 1,
        "callbacks": [],
        "bar": None,
        "plugin": SimpleNamespace(),
        "results": {},
        "loop": {},
    } | changes
    return SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_results=given["results"], **given["loop"])),
        strategy=SimpleNamespace(root_device=torch.device(given["device"])),
        precision_plugin=given["plugin"],
        world_size=given["world_size"],
        callbacks=given["callbacks"],
        progress_bar_callback=given["bar"],
    )


BAR, BROADCASTS = SimpleNamespace(is_enabled=True), {"_broadcast_sigterm_tensor": lambda: None}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ()),
        ({"bar": BAR, "results": {"loss": _metric()}}, ("prog_bar",)),
        ({"bar": BAR, "results": {"loss": _metric(prog_bar=False)}}, ()),
        ({"bar": BAR, "results": {"loss": _metric("cpu")}}, ()),
        ({"bar": SimpleNamespace(is_enabled=False), "results": {"loss": _metric()}}, ()),
        ({"results": {"loss": _metric()}}, ()),
        ({"bar": BAR, "results": {"loss": _metric()}, "device": "cpu"}, ()),
        ({"plugin": SimpleNamespace(scaler=object())}, ("grad_scaler",)),
        ({"plugin": SimpleNamespace(scaler=None)}, ()),
        ({"world_size": 2, "loop": BROADCASTS}, ("sigterm_broadcast",)),
        ({"world_size": 2}, ()),
        ({"loop": BROADCASTS}, ()),
        ({"callbacks": [ThroughputMonitor(lambda batch: 1)]}, ("throughput_monitor",)),
        ({"callbacks": [ThroughputMonitor(lambda batch: 1)], "device": "cpu"}, ()),
        ({"callbacks": [Callback()]}, ()),
    ],
)
def test_known_syncs_lists_settings_that_synchronize_the_device(
    changes: dict[str, Any], found: tuple[str, ...]
) -> None:
    assert _host.known_syncs(_trainer(**changes)) == found
    assert set(found) <= set(SYNCS)
