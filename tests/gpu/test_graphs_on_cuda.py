"""CUDA graphs in the step, torch.compile's and the user's own: the weights are those without our callbacks."""

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from on_cuda import PrefetchOver, SlowCopies, Unordered, fitted, same_weights, warm_up
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_feed import GPUStarvationCallback

pytestmark = [
    pytest.mark.gpu,
    # Parameters meet two streams, the one of the capture and the one of the steps before it, as is meant.
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream"),
]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))


class Compiled(LightningModule):
    """The network is recorded and played back by torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.compiled = [torch.compile(self.net, mode="reduce-overhead")]  # in a list, as it is no second submodule

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return self.compiled[0](batch).square().mean()

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.05)


class Captured(LightningModule):
    """Forward and backward are captured in step 3, with the next batch on its way, and played back from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.automatic_optimization = False
        self.static = torch.empty(0)
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.capture(batch)
        if self.graphs:
            self.static.copy_(batch)
            self.graphs[0].replay()
        else:
            self.zero_grad()
            self.net(batch).square().mean().backward()
        self.optimizers().step()

    def capture(self, batch: Tensor) -> None:
        self.static = batch.clone()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):  # cuBLAS and autograd make what they need outside of the capture
                self.zero_grad()
                self.net(self.static).square().mean().backward()
        torch.cuda.current_stream().wait_stream(beside)
        self.zero_grad()  # so that the gradients are made in the graph's memory, where each replay writes them
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.net(self.static).square().mean().backward()
        self.graphs.append(graph)

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.05)


def trained(kind: type[LightningModule], *callbacks: Callback) -> LightningModule:
    warm_up()
    torch.manual_seed(1)
    # Without workers: other threads may not allocate pinned memory while a graph is captured.
    loader = DataLoader(torch.randn(960, 64), batch_size=16, pin_memory=True)
    model: LightningModule = fitted(kind(), loader, *callbacks, max_epochs=1)
    return model


def assert_same_as_without(kind: type[LightningModule], depth: int) -> None:
    """With copies that come late; the control does not wait for them."""
    prefetch, meter = PrefetchOver(SlowCopies, depth=depth), GPUStarvationCallback(nvml=False, report=False)
    plain = trained(kind)
    assert same_weights(plain, trained(kind, prefetch, meter))
    assert prefetch.active
    assert not same_weights(plain, trained(kind, PrefetchOver(Unordered, depth=depth)))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_graph_captured_inside_training_step(depth: int) -> None:
    assert_same_as_without(Captured, depth)


@pytest.mark.timeout(400)  # three fits are compiled
@pytest.mark.filterwarnings("default")  # what torch.compile warns of is not about us
def test_torch_compile_with_reduce_overhead() -> None:
    from torch.utils._triton import has_triton

    headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    if not (has_triton() and headers and any(map(shutil.which, ("cc", "gcc", "clang")))):
        pytest.skip("torch.compile needs Triton, a C compiler and the headers of Python here")
    assert_same_as_without(Compiled, depth=1)
