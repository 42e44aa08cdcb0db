"""Lean batches on a real device: packed tensors are right while memory is reused, and nothing waits."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from on_cuda import PrefetchOver, SlowCopies, Unordered, Unrecorded, fitted, spin, warm_up
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_feed import PrefetchCallback
from lightning_feed.transfer.prefetcher import DeviceStream
from lightning_feed.transfer.transfer_filter import pack, small_tensors

pytestmark = pytest.mark.gpu

PARTS = 24
BATCHES = 60


class Parts(Dataset[Any]):
    """Part p of sample i is all i + p, so that a buffer that was handed on too early gives itself away."""

    def __len__(self) -> int:
        return 16 * BATCHES

    def __getitem__(self, index: int) -> Any:
        parts = {f"part{number}": torch.full((1 + number,), index + number) for number in range(PARTS)}
        return {**parts, "large": torch.full((64, 1024), index), "meta": f"{index}"}


class Checks(LightningModule):
    """Looks at each batch ``late_ms`` after it was asked to, when all references to it are gone."""

    def __init__(self, late_ms: float = 0) -> None:
        super().__init__()
        self.late_ms = late_ms
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.wrong: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert "meta" not in batch
        first = 16 * batch_idx
        index = torch.arange(first, first + 16, device=self.device)[:, None]
        spin(self.late_ms)
        for number in range(PARTS):
            assert batch[f"part{number}"].is_cuda
            self.wrong.append((batch.pop(f"part{number}") != index + number).any())
        return self.weight * batch.pop("large").float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def count_wrong(callback: PrefetchCallback, late_ms: float = 0) -> int:
    warm_up()
    loader = DataLoader(Parts(), batch_size=16, num_workers=2, pin_memory=True)
    model = fitted(Checks(late_ms), loader, callback, max_epochs=1)
    assert callback.active
    assert len(model.wrong) == BATCHES * PARTS
    return int(torch.stack(model.wrong).sum())


@pytest.mark.parametrize("pack_small", [True, "auto", False])
@pytest.mark.parametrize("depth", [1, 3])
def test_no_tensor_is_corrupted(pack_small: Any, depth: int) -> None:
    options = {"depth": depth, "drop_keys": ("meta",), "pack_small": pack_small}
    assert count_wrong(PrefetchOver(DeviceStream, **options), late_ms=20) == 0
    assert count_wrong(PrefetchOver(SlowCopies, **options)) == 0


@pytest.mark.parametrize(("stream", "late_ms"), [(Unrecorded, 20), (Unordered, 0)])
@pytest.mark.parametrize("pack_small", [True, False])
def test_the_check_sees_a_stream_with_a_fault(stream: Any, late_ms: float, pack_small: bool) -> None:
    assert count_wrong(PrefetchOver(stream, drop_keys=("meta",), pack_small=pack_small), late_ms) > 0


def test_auto_decides_and_gives_the_devices_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning_feed"):
        count_wrong(PrefetchCallback(drop_keys=("meta",)))
    said = [record.getMessage() for record in caplog.records if "small tensors" in record.getMessage()]
    assert len(said) == 1
    assert said[0].count("us of copying") == 2


def test_packing_synchronises_nothing() -> None:
    batch = [torch.full((number + 1,), number).pin_memory() for number in range(PARTS)]

    def packed(**how: bool) -> list[Tensor]:
        made: list[Tensor] = pack(batch, small_tensors(batch), lambda host: host.to("cuda", **how), pin=True)
        return made

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        packed(non_blocking=True)  # makes the memory that is used again below
        try:
            torch.cuda.set_sync_debug_mode("error")
            made = packed(non_blocking=True)
            with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):  # the control
                packed(non_blocking=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert all(torch.equal(one.cpu(), other) for one, other in zip(made, batch, strict=True))


def test_host_buffers_are_not_handed_out_again_before_their_copy_is_over() -> None:
    """Many packed batches issued behind a busy stream: each has to arrive with its own values."""
    warm_up()
    side = torch.cuda.Stream()
    behind = torch.cuda.Event()
    made = []
    with torch.cuda.stream(side):
        spin(300)
        behind.record()
        for index in range(50):
            batch = [torch.full((number + 1,), 1000 * index + number) for number in range(PARTS)]
            made.append(pack(batch, small_tensors(batch), lambda host: host.to("cuda", non_blocking=True), pin=True))
    assert not behind.query(), "the device was done before all copies were issued, so nothing was tried"
    side.synchronize()
    for index, batch in enumerate(made):
        assert [tensor[0].item() for tensor in batch] == [1000 * index + number for number in range(PARTS)]
