"""Waits for the device on a real device: their lines, torch's state afterwards, and what the GPU did meanwhile."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from on_cuda import fitted, spin, warm_up
from torch import Tensor, nn

from lightning_feed import GPUStarvationCallback
from lightning_feed.measure.device_waits import SAMPLED_STEPS
from lightning_feed.verdict.diagnosis import Diagnosis

STEPS = 120


class Batches:
    """The same batch on the device, as often as asked for."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.batch = torch.ones(64, 32, device="cuda")

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Any:
        return iter([self.batch] * self.steps)


class Step(LightningModule):
    """Keeps the device busy for ``ms``, and does ``read`` with the loss.

    Args:
        read: called with the loss.
        ms: work of the device in a step.
        layers: number of tiny layers, which take the host longer than the device.
    """

    def __init__(self, read: Any = None, *, ms: float = 1.0, layers: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
        self.read = read
        self.ms = ms

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        spin(self.ms)
        loss: Tensor = self.net(batch).sum()
        if self.read is not None:
            self.read(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def reads_item(loss: Tensor) -> None:
    loss.item()


def copies(loss: Tensor) -> None:
    loss.cpu()


def branches(loss: Tensor) -> None:
    if loss > 0:
        pass


def synchronises(loss: Tensor) -> None:
    torch.cuda.synchronize()


def diagnosed(model: Step, steps: int = STEPS) -> Diagnosis:
    warm_up()
    starvation = GPUStarvationCallback(report=False)
    fitted(model, Batches(steps), starvation, max_epochs=1)
    return starvation.report()


@pytest.mark.gpu(twin="simulated/test_device_waits.py::test_the_line_that_waits_in_each_step_is_found")
@pytest.mark.parametrize("read", [reads_item, copies, branches, synchronises])
def test_the_line_that_waits_in_each_step_is_found_on_a_device(read: Any) -> None:
    [wait] = diagnosed(Step(read)).measurements.facts.waits or ()
    assert (wait.file, wait.line) == (__file__, read.__code__.co_firstlineno + 1)
    assert wait.is_users
    assert wait.steps == wait.sampled_steps == SAMPLED_STEPS


@pytest.mark.gpu(twin="simulated/test_device_waits.py::test_a_step_that_does_not_wait_has_no_lines")
def test_a_step_that_launches_only_waits_nowhere() -> None:
    assert diagnosed(Step()).measurements.facts.waits == ()


@pytest.mark.gpu(twin="simulated/test_device_waits.py::test_an_error_in_a_sampled_step_leaves_nothing_behind")
def test_the_debug_mode_the_filters_and_synchronize_are_as_before() -> None:
    filters = warnings.filters
    before = list(filters)
    synchronize = torch.cuda.synchronize
    diagnosed(Step(reads_item))
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.cuda.synchronize is synchronize
    assert warnings.filters is filters
    assert list(filters) == before


@pytest.mark.gpu(
    twin="verdict/test_causes.py::test_the_cause_of_a_long_step_follows_the_device_and_the_training_thread"
)
def test_a_busy_device_is_not_launch_bound_although_the_host_spins() -> None:
    """The host is far ahead, or waits in ``item()``: the training thread is on a CPU all the time."""
    for read in (None, reads_item):
        diagnosis = diagnosed(Step(read, ms=20.0), steps=300)
        assert diagnosis.measurements.device_busy_pct is not None
        assert diagnosis.measurements.device_busy_pct > 90
        assert (diagnosis.bottleneck, diagnosis.cause) == ("compute", "compute")


@pytest.mark.gpu(
    twin="verdict/test_causes.py::test_the_cause_of_a_long_step_follows_the_device_and_the_training_thread"
)
def test_tiny_layers_are_launch_bound() -> None:
    diagnosis = diagnosed(Step(ms=0.01, layers=200), steps=200)
    assert diagnosis.measurements.device_busy_pct is not None
    assert diagnosis.measurements.device_busy_pct < 80
    assert (diagnosis.bottleneck, diagnosis.cause) == ("compute", "launch")
