"""Lean batches on a real device: packed tensors are right while memory is reused, and nothing waits."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from on_cuda import fitted
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_feed import PrefetchCallback
from lightning_feed.transfer.packing import pack, small_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
]

PARTS = 24


class Parts(Dataset[Any]):
    """Part p of sample i is all i + p, so that a buffer that was handed on too early gives itself away."""

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> Any:
        parts = {f"part{number}": torch.full((1 + number,), index + number) for number in range(PARTS)}
        return {**parts, "index": torch.tensor(index), "large": torch.full((64, 1024), index), "meta": f"{index}"}


class Checks(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.wrong: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert "meta" not in batch
        index = batch["index"][:, None]
        for _ in range(20):  # keep the compute stream behind the host
            index = index + 0
        for number in range(PARTS):
            assert batch[f"part{number}"].is_cuda
            self.wrong.append((batch.pop(f"part{number}") != index + number).any())
        return self.weight * batch["large"].float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def fit(callbacks: list[Callback], workers: int = 2) -> Checks:
    loader = DataLoader(Parts(), batch_size=16, num_workers=workers, pin_memory=True)
    model: Checks = fitted(Checks(), loader, *callbacks)
    return model


@pytest.mark.parametrize("pack_small", [True, "auto", False])
@pytest.mark.parametrize("depth", [1, 3])
def test_no_tensor_is_corrupted(pack_small: Any, depth: int) -> None:
    callback = PrefetchCallback(depth=depth, drop_keys=("meta",), pack_small=pack_small)
    model = fit([callback])
    assert callback.active
    assert len(model.wrong) == 200 * PARTS
    assert not any(wrong.item() for wrong in model.wrong)


def test_auto_decides_and_gives_the_devices_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning_feed"):
        fit([PrefetchCallback(drop_keys=("meta",))])
    said = [record.getMessage() for record in caplog.records if "small tensors" in record.getMessage()]
    assert len(said) == 1
    assert said[0].count("us of copying") == 2


def test_packing_synchronises_nothing() -> None:
    batch = [torch.full((number + 1,), number).pin_memory() for number in range(PARTS)]
    side = torch.cuda.Stream()
    pack(batch, small_tensors(batch), lambda host: host.to("cuda", non_blocking=True), pin=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            made = pack(batch, small_tensors(batch), lambda host: host.to("cuda", non_blocking=True), pin=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert all(torch.equal(one.cpu(), other) for one, other in zip(made, batch, strict=True))


def test_host_buffers_are_not_handed_out_again_before_their_copy_is_over() -> None:
    """Many packed batches issued behind a busy stream: each has to arrive with its own values."""
    side = torch.cuda.Stream()
    made = []
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for index in range(50):
            batch = [torch.full((number + 1,), 1000 * index + number) for number in range(PARTS)]
            made.append(pack(batch, small_tensors(batch), lambda host: host.to("cuda", non_blocking=True), pin=True))
    side.synchronize()
    for index, batch in enumerate(made):
        assert [tensor[0].item() for tensor in batch] == [1000 * index + number for number in range(PARTS)]
