"""A notebook's kernel is interrupted in the middle of a diagnosis: the cell ends, and all is as it was before."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SETUP = """
import signal, torch
from pathlib import Path
from torch.utils.data import DataLoader
from lightning.pytorch import LightningModule, Trainer
from lightning_feed import diagnose

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        Path("began").touch()
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model = Model()
trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
before = model.layer.weight.clone(), torch.get_rng_state(), signal.getsignal(signal.SIGINT)
"""
LOOK = """
after = model.layer.weight, torch.get_rng_state(), signal.getsignal(signal.SIGINT)
print(torch.equal(before[0], after[0]), torch.equal(before[1], after[1]), before[2] == after[2], model._trainer)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client: Any, code: str) -> str:
    """What a cell prints, or the name of what it raises."""
    said: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        content = message["content"]
        said.append(content.get("text", "") if message["msg_type"] == "stream" else content.get("ename", ""))

    # After an error, a kernel aborts what has arrived already.
    while client.execute_interactive(code, timeout=200, output_hook=hear)["content"]["status"] == "aborted":
        time.sleep(0.1)
    return "".join(said).strip()


@pytest.mark.slow
def test_interrupted_notebook_kernel_restores_the_state(kernel: Any, tmp_path: Path) -> None:
    manager, client = kernel
    assert "Error" not in run(client, SETUP)
    client.execute("found = diagnose(trainer, model, train_dataloaders=DataLoader(torch.ones(64, 4), batch_size=4))")
    until = time.monotonic() + 120
    while not (tmp_path / "began").exists() and time.monotonic() < until:
        time.sleep(0.1)
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=120)["content"]
    assert reply["ename"] == "DiagnosisInterrupted"
    assert run(client, LOOK) == "True True True None"
