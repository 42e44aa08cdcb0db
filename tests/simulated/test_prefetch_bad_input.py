"""Batches, transfers and callbacks that are not as they should be, on the simulated device."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins import MixedPrecision
from recording import Numbers
from simulated.device import SimulatedDevice
from simulated.training import Model, SimulatedLoader, evaluate, fit, numbers
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_feed import PrefetchCallback
from lightning_feed.transfer import prefetcher
from lightning_feed.transfer.prefetcher import DeviceStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


class AnyBatch(Model):
    """Takes what comes: only what lies on the device is read there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        self.sim.launch(self.compute_ms, what="training_step", reads=batch)
        return self.net(torch.ones(1, 8, device=self.device)).mean()


def trained(model: Model, make: Any = numbers, *others: Callback, **options: Any) -> Model:
    """Seven steps with the callback, without a race."""
    callback = PrefetchCallback(**options)
    fit(model.sim, model, SimulatedLoader(model.sim, 7, make=make), callback, *others)
    assert callback.active
    assert model.sim.races == []
    assert len(model.seen) == 7
    return model


def test_a_transfer_that_leaves_the_batch_on_the_host_trains_as_usual() -> None:
    class Stays(AnyBatch):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch

    assert trained(Stays(SimulatedDevice())).sim.copies == 2  # of the module's parameters


def graph(index: int) -> Any:
    """Under a key of a batch, as ``host_keys`` needs it."""
    data: Any = pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1], [1, 0]])
    graphs = [data.Data(x=torch.full((2, 8), float(index)), edge_index=edges) for _ in range(3)]
    return {"x": numbers(index), "graph": data.Batch.from_data_list(graphs)}


class LeavesGraphs(AnyBatch):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return {**super().transfer_batch_to_device({"x": batch["x"]}, device, dataloader_idx), "graph": batch["graph"]}


class DividesGraphs(AnyBatch):
    """Copies one tensor of a graph to the device; the others stay where they are."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        there = super().transfer_batch_to_device({"x": batch["x"]}, device, dataloader_idx)
        batch["graph"].x = batch["graph"].x.to(device, non_blocking=True)
        return {**there, "graph": batch["graph"]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        graph = batch.pop("graph").to_dict()
        on_host = {name for name in graph if graph[name].device.type == "cpu"}
        assert on_host == {"edge_index", "batch", "ptr"}
        self.sim.launch(self.compute_ms, what="training_step", reads=[graph[name] for name in graph.keys() - on_host])
        return super().training_step(batch, batch_idx)


class AddsToGraphs(DividesGraphs):
    """Puts a new tensor beside them, before the transfer."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["graph"].noise = torch.rand(6, 8, device=self.device)
        return batch


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("model", "host_keys", "depth"),
    [
        (AnyBatch, (), 1),
        (AnyBatch, ("graph",), 3),
        (LeavesGraphs, (), 1),
        (DividesGraphs, (), 3),
        (AddsToGraphs, (), 3),
        pytest.param(AddsToGraphs, (), 1, marks=pytest.mark.nightly),
    ],
)
def test_graph_batches_on_device_host_or_both_train_without_races(
    model: type[Model], host_keys: tuple[str, ...], depth: int
) -> None:
    """PyTorch Geometric's, whose ``record_stream`` asks each tensor, and fails at those on the host."""
    trained(model(SimulatedDevice()), graph, depth=depth, host_keys=host_keys)


def test_graph_tensors_that_are_not_recorded_cause_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(prefetcher, "record_stream", lambda batch, stream: None)
    with pytest.raises(AssertionError, match="handed out again"):
        trained(DividesGraphs(SimulatedDevice()), graph)


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_that_change_their_structure_train_without_races(depth: int) -> None:
    def make(index: int) -> Any:
        x = numbers(index)
        parts = {f"p{n}": torch.full((n + 1,), index) for n in range(3 * index)}
        return [x, {"x": x, **parts}, (x, [x, None, "name"]), {"x": x}][index % 4]

    trained(AnyBatch(SimulatedDevice()), make, depth=depth)


class Static:
    """As DALI: one buffer on the device that every batch is written to."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.drawn = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        buffer = torch.zeros(4, 8, device="meta")
        for _ in range(4):
            self.drawn += 1
            yield buffer.zero_()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_second_loader_of_device_tensors_is_not_drawn_ahead(depth: int) -> None:
    """A batch that lies on the device already may be overwritten by the next: no other is drawn before its step."""
    device = SimulatedDevice()
    static = Static(device)

    class Counts(AnyBatch):
        transfers = 0

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            self.transfers += 1
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if dataloader_idx == 1:
                self.seen.append(static.drawn - batch_idx)

    model = Counts(device)
    evaluate(device, "validate", model, [SimulatedLoader(device, 3), static], PrefetchCallback(depth=depth))
    assert model.seen == [1] * 4
    assert model.transfers == 3 + 4
    assert device.races == []


class Small(Model):
    """A device on which a batch of more than 8 rows, or its fourth batch, has no room."""

    fails_at: int | None = None
    transferred = 0

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.transferred += 1
        if len(batch) > 8 or self.transferred - 1 == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


@pytest.mark.parametrize("depth", [1, 3])
def test_an_out_of_memory_error_is_raised_at_the_step_of_its_batch(depth: int) -> None:
    device = SimulatedDevice()
    model = Small(device)
    model.fails_at = 4
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        fit(device, model, SimulatedLoader(device, 7), PrefetchCallback(depth=depth))
    assert model.seen == [0, 1, 2, 3]


@pytest.mark.parametrize("callbacks", [[], [PrefetchCallback(depth=2)]])
def test_the_batch_size_finder_handles_out_of_memory_while_prefetching(
    callbacks: list[Callback], tmp_path: Any
) -> None:
    class Sized(Small):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(Numbers(256), batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch.repeat(1, 2)).mean()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

    device = SimulatedDevice()
    model = Sized(device)
    finder = BatchSizeFinder(init_val=2, steps_per_trial=3, max_trials=5)
    # The finder saves a checkpoint, and loads it on the host.
    fit(device, model, None, finder, *callbacks, max_steps=4, default_root_dir=tmp_path)
    assert model.batch_size == 8
    assert device.races == []


class Captures(Callback):
    """Captures a graph of the backward pass."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 2:
            self.graph = self.device.graph()
            self.graph.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 2:
            self.graph.__exit__(None, None, None)

    on_after_backward.__module__ = "lightning.pytorch"  # with a user's callback, no batch is fetched before this hook


def test_no_batch_is_copied_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gradient scaler, batches are fetched within the step."""

    def train() -> None:
        device = SimulatedDevice()
        scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        fit(
            device, AnyBatch(device), SimulatedLoader(device, 7), PrefetchCallback(), Captures(device), plugins=[scaled]
        )
        assert device.races == []

    train()
    monkeypatch.setattr(DeviceStream, "is_capturing", lambda self: False)
    with pytest.raises(AssertionError, match="while a graph was captured"):
        train()
