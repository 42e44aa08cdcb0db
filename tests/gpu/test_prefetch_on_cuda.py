"""PrefetchCallback on a real device: right batches, copies beside computing, memory that does not grow.

Each claim has a control beside it: a fit with one fault, or without the callback, in which the same check must fail.
"""

import gc
from typing import Any

import pytest
import torch
from gpu_trace import Trace, covered_pct, profiled
from lightning.pytorch import Callback, LightningModule, Trainer
from on_cuda import (
    FreshStreams,
    NoWaiting,
    PrefetchOver,
    SlowCopies,
    Unordered,
    Unrecorded,
    fitted,
    pinned_loader,
    spin,
    warm_up,
)
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from lightning_feed import PrefetchCallback
from lightning_feed.transfer.prefetcher import DeviceStream

# --- no batch is read too early or too late ---------------------------------------------------------------------------

BATCHES = 40


class Numbered(Dataset[Any]):
    """Batch k is all k, so that memory that was handed on too early gives itself away."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((32, 3, 128, 128), index, dtype=torch.uint8), "meta": index}


class Checks(LightningModule):
    """Looks at each batch ``late_ms`` after it was asked to, when the host is some batches further."""

    def __init__(self, late_ms: float = 0) -> None:
        super().__init__()
        self.late_ms = late_ms
        self.weight = nn.Parameter(torch.ones(()))
        self.wrong: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch["x"].is_cuda
        spin(self.late_ms)
        values = batch.pop("x").float()  # the last reference to the copied memory goes before the device has read it
        self.wrong.append((values != batch_idx).any())
        loss: Tensor = self.weight * values.mean()
        return loss

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=1e-9)


def count_wrong(callback: PrefetchCallback, late_ms: float = 0, workers: int = 0) -> int:
    warm_up()
    loader = DataLoader(Numbered(), batch_size=None, num_workers=workers, pin_memory=True)
    model = fitted(Checks(late_ms), loader, callback, max_epochs=1)
    assert callback.active
    assert len(model.wrong) == BATCHES
    return sum(int(one) for one in model.wrong)


@pytest.mark.gpu(twin="simulated/test_faulty_streams.py::test_races_are_found_only_in_the_streams_with_a_fault")
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_never_corrupted(depth: int, workers: int) -> None:
    late = PrefetchOver(DeviceStream, depth=depth, host_keys=("meta",))
    slow = PrefetchOver(SlowCopies, depth=depth, host_keys=("meta",))
    assert count_wrong(late, late_ms=20, workers=workers) == 0
    assert count_wrong(slow, workers=workers) == 0


@pytest.mark.gpu(twin="simulated/test_faulty_streams.py::test_races_are_found_only_in_the_streams_with_a_fault")
@pytest.mark.parametrize(("stream", "late_ms"), [(Unrecorded, 20), (Unordered, 0)])
@pytest.mark.parametrize("depth", [1, 3])
def test_corruption_check_detects_a_faulty_stream(stream: Any, late_ms: float, depth: int) -> None:
    assert count_wrong(PrefetchOver(stream, depth=depth), late_ms) > 0


# --- beside computing -------------------------------------------------------------------------------------------------


class Busy(LightningModule):
    """Keeps the device busy for ``ms`` a step, and the host not at all."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total = batch.sum()
        del batch
        spin(self.ms)
        loss: Tensor = self.weight * total
        return loss

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=1e-9)


@pytest.mark.gpu(twin="simulated/test_prefetch_time.py::test_copies_overlap_with_compute_as_far_as_theory_allows")
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "plain"])
def test_copies_overlap_the_steps_only_with_the_callback(ours: bool) -> None:
    """By the profiler's trace; without the callback every copy waits for the step before it: the control."""
    warm_up()
    loader = pinned_loader(30, 32)
    traces: list[Trace] = []
    with profiled(traces):
        fitted(Busy(20), loader, *([PrefetchCallback()] if ours else []), max_epochs=1)
    steps = traces[0].spins
    copies = [(start, end) for start, end in traces[0].to_device if end - start > 200]  # a batch takes longer
    assert len(steps) == len(copies) == 30
    under = covered_pct(copies[1:], steps)  # the first batch has no step before it
    assert under >= 95 if ours else under <= 5


def streams_of_transfers(*callbacks: Callback) -> tuple[set[int], set[int]]:
    """Streams on which batches were transferred, and on which the hook after that ran: with a validation inside."""
    transfer: set[int] = set()
    after: set[int] = set()

    class Notes(Busy):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            transfer.add(torch.cuda.current_stream().cuda_stream)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            after.add(torch.cuda.current_stream().cuda_stream)
            return batch

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    loaders: Any = (DataLoader([*torch.randn(count, 64)], batch_size=16, pin_memory=True) for count in (160, 48))  # type: ignore[arg-type]
    train, val = loaders
    fitted(Notes(1), train, *callbacks, val=val, val_check_interval=4)
    return transfer, after


@pytest.mark.gpu(
    twin="simulated/test_prefetch_order.py::test_batches_use_the_side_stream_and_user_hooks_the_compute_stream"
)
def test_batches_use_the_side_stream_and_user_hooks_the_compute_stream() -> None:
    compute = {torch.cuda.current_stream().cuda_stream}
    assert streams_of_transfers() == (compute, compute)
    transfer, after = streams_of_transfers(PrefetchCallback())
    assert len(transfer) == 1
    assert transfer != compute
    assert after == compute


# --- memory -----------------------------------------------------------------------------------------------------------

MEGABYTES = 32


def growth(callback: PrefetchCallback) -> float:
    """Batches' worth of memory that torch reserved from the end of the first epoch to that of the eighth."""
    reserved: list[int] = []

    class Reads(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            reserved.append(torch.cuda.memory_reserved())

    gc.collect()
    torch.cuda.empty_cache()
    fitted(Busy(5), pinned_loader(8, MEGABYTES), callback, Reads(), max_epochs=8)
    return (reserved[-1] - reserved[0]) / (MEGABYTES << 20)


@pytest.mark.gpu(
    twin="simulated/test_prefetch_time.py::test_prefetched_memory_is_bounded_when_validation_interrupts_training"
)
def test_memory_does_not_grow_with_epochs() -> None:
    warm_up()
    assert growth(PrefetchCallback()) <= 1.5  # one more batch may be on its way than in the first epoch
    assert growth(PrefetchOver(FreshStreams)) > 5  # the control


# --- nothing waits ----------------------------------------------------------------------------------------------------


class Waits(Busy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch.sum().item()
        return super().training_step(batch, batch_idx)


@pytest.mark.gpu(twin="simulated/test_prefetch_time.py::test_the_host_waits_only_when_it_is_too_far_ahead")
def test_prefetching_adds_no_device_sync() -> None:
    """torch's own check covers ``.item()``, blocking copies and streams that are synchronised; the control waits so."""
    warm_up()
    fitted(Busy(5), pinned_loader(20, 1), PrefetchCallback(), NoWaiting(), max_epochs=1)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        fitted(Waits(5), pinned_loader(20, 1), PrefetchCallback(), NoWaiting(), max_epochs=1)


# --- batches that stay on the host ------------------------------------------------------------------------------------


class Graph:
    """As PyTorch Geometric's batches: ``record_stream`` is passed on to each tensor, on the host or not."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.x, self.edges = x, edges

    def record_stream(self, stream: Any) -> None:
        self.x.record_stream(stream)
        self.edges.record_stream(stream)


class Graphs(Busy):
    divided = False

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return Graph(batch.x.to(device, non_blocking=True), batch.edges) if self.divided else batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch.x.is_cuda == self.divided
        assert not batch.edges.is_cuda
        return super().training_step(batch.x.to(self.device), batch_idx)


@pytest.mark.gpu(
    twin="simulated/test_prefetch_bad_input.py::test_graph_batches_on_device_host_or_both_train_without_races"
)
@pytest.mark.parametrize("divided", [False, True])
def test_graph_batches_with_host_tensors_are_prefetched(divided: bool) -> None:
    graph = Graph(torch.ones(8), torch.zeros(2, 2))
    with pytest.raises(NotImplementedError, match="record_stream"):  # the control
        graph.record_stream(torch.cuda.current_stream())
    model, callback = Graphs(1), PrefetchCallback()
    model.divided = divided
    fitted(model, DataLoader([graph] * 8, batch_size=None), callback, max_epochs=1)  # type: ignore[arg-type]
    assert callback.active
