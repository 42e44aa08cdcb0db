"""PrefetchCallback on the simulated device: everything is ordered, for any setting; whatever is left out is found."""

import threading
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision
from simulated.device import DEVICE, SimulatedDevice, Stream, simulated
from simulated.training import Model, SimulatedLoader, fit
from torch import Tensor

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.load import copy_fence
from lightning_feed.load.copy_fence import CopyFence
from lightning_feed.transfer.prefetcher import DeviceStream, Prefetcher

pytestmark = [
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*"),
]


def in_parts(index: int) -> dict[str, Any]:
    """A batch of many small tensors, of two shapes in turn."""
    rows = 2 + index % 2
    return {"x": torch.full((rows, 8), float(index)), **{f"p{n}": torch.full((rows,), index) for n in range(9)}}


class Keeps(Model):
    """Its transfer keeps things on the device from one batch to the next, as transforms on the device do."""

    constants: dict[torch.Size, Tensor]
    mean: Tensor | None = None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        there = super().transfer_batch_to_device(batch, device, dataloader_idx)
        x = there["x"]
        constants = self.__dict__.setdefault("constants", {})
        if x.shape not in constants:
            constants[x.shape] = torch.ones(x.shape[1:], device=device)
        now = x.mean()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return {**there, "normal": x * constants[x.shape] - self.mean}


class Prepares(Model):
    """Its hook before the transfer puts a tensor on the device itself."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "noise": torch.rand(batch["x"].shape, device=DEVICE)}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        there = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return {"x": there["x"], "noisy": there["x"] + there.pop("noise")}


class Manual(Keeps):
    """Manual optimisation, twice a step."""

    def __init__(self, device: SimulatedDevice, **options: Any) -> None:
        super().__init__(device, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(2):
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


MODELS = {"plain": Model, "keeps": Keeps, "prepares": Prepares, "manual": Manual}


class Fault(Exception):
    pass


def failing(at: int | None) -> Any:
    def make(index: int) -> Any:
        if index == at:
            raise Fault(index)
        return in_parts(index)

    return make


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    model=st.sampled_from(sorted(MODELS)),
    depth=st.integers(1, 3),
    host_keys=st.sampled_from([(), ("p0",)]),
    validate_every=st.sampled_from([None, 1, 2, 3]),
    accumulate=st.integers(1, 2),
    scaled=st.booleans(),
    synchronise=st.booleans(),
    fails_at=st.sampled_from([None, None, 0, 3, 6]),
    max_steps=st.sampled_from([-1, 3]),
    period_ms=st.sampled_from([0.0, 3.0]),
)
def test_prefetching_is_race_free_in_random_configurations(
    model: str,
    depth: int,
    host_keys: tuple[str, ...],
    validate_every: int | None,
    accumulate: int,
    scaled: bool,
    synchronise: bool,
    fails_at: int | None,
    max_steps: int,
    period_ms: float,
) -> None:
    device = SimulatedDevice(copy_bytes_per_ms=100)
    made = MODELS[model](device, synchronise=synchronise)
    loader = SimulatedLoader(device, 7, period_ms=period_ms, make=failing(fails_at))
    callback = PrefetchCallback(depth=depth, host_keys=host_keys)
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": max_steps}
    if validate_every is not None:
        options |= {"val": SimulatedLoader(device, 3, make=in_parts), "val_check_interval": validate_every}
    if scaled:
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]
    if model != "manual":
        options["accumulate_grad_batches"] = accumulate
    try:
        fit(device, made, loader, callback, GPUStarvationCallback(every_n_steps=2, report=False), **options)
    except Fault:
        assert fails_at is not None
    assert device.races == []
    times = 2 if model == "manual" else 1
    order = [float(index) for index in range(7) for _ in range(times)] * 2
    assert made.seen == order[: len(made.seen)]
    if max_steps == -1:
        assert len(made.seen) == (len(order) if fails_at is None else times * fails_at)


# --- controls: each of these is wrong, and found ----------------------------------------------------------------------


def races(model: type[Model] = Keeps, **options: Any) -> list[str]:
    """Of a fit with a validation in its middle, whose steps keep the device behind the host."""
    device = SimulatedDevice(copy_bytes_per_ms=100)
    loaders = (SimulatedLoader(device, count, make=in_parts) for count in (7, 2))
    fit(device, model(device), next(loaders), PrefetchCallback(**options), val=next(loaders), val_check_interval=3)
    return device.races


@pytest.mark.parametrize("model", MODELS.values())
def test_unchanged_prefetching_has_no_race(model: type[Model]) -> None:
    assert races(model) == []


def test_a_copy_on_the_compute_stream_races_with_copies_on_the_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: the first batch of an epoch, and the first after a validation, went over the compute stream."""
    monkeypatch.setattr(Prefetcher, "pass_on", lambda self, batch, copy: copy(batch))
    assert any("on side" in race for race in races())


def test_unrecorded_tensors_of_a_user_hook_cause_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `record_stream` their memory may be handed out again while the side stream reads it."""

    def follow_compute(self: Any, batch: Any = None) -> None:
        self.stream.wait_stream(self._backend.current_stream())

    monkeypatch.setattr(DeviceStream, "follow_compute", follow_compute)
    assert any("handed out again" in race for race in races(Prepares, depth=2))


def test_a_side_stream_that_does_not_wait_for_compute_causes_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStream, "follow_compute", lambda self, batch=None: None)
    assert any("without waiting for compute" in race for race in races(Prepares))


def test_batches_use_the_side_stream_and_user_hooks_the_compute_stream() -> None:
    """With a validation inside."""
    device = SimulatedDevice()
    transfer: set[Stream] = set()
    after: set[Stream] = set()

    class Notes(Model):
        def transfer_batch_to_device(self, batch: Any, where: torch.device, dataloader_idx: int) -> Any:
            transfer.add(device.current_stream())
            return super().transfer_batch_to_device(batch, where, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            after.add(device.current_stream())
            return batch

    def run(*callbacks: Any) -> tuple[set[Stream], set[Stream]]:
        transfer.clear()
        after.clear()
        loaders = (SimulatedLoader(device, count) for count in (10, 3))
        fit(device, Notes(device), next(loaders), *callbacks, val=next(loaders), val_check_interval=4, max_epochs=2)
        return {*transfer}, {*after}

    assert run() == ({device.compute}, {device.compute})
    sides, computes = run(PrefetchCallback())
    assert len(sides) == 1
    assert sides != {device.compute}
    assert computes == {device.compute}


def test_copy_fence_records_no_event_on_a_deleted_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    monkeypatch.setattr(copy_fence, "copying", WeakSet())
    with simulated(device):
        copiers = [DeviceStream(DEVICE) for _ in range(8)]
        copy_fence.copying.update(copiers)
        assert len(CopyFence().events()) == 1 + 8
        copiers.clear()
        assert len(CopyFence().events()) == 1


class _Replaced:
    """A copier during whose turn another thread adds one."""

    def __init__(self) -> None:
        self.added = DeviceStream(DEVICE)
        self.thread = threading.Thread(target=copy_fence.register, args=[self.added])

    @property
    def stream(self) -> Any:
        self.thread.start()
        self.thread.join(0.1)  # with the lock, it waits until the events are recorded
        return self.added.stream


class _Collecting:
    """A copier during whose turn a batch is dropped in the same thread, as the garbage collector may do."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.events: list[Any] | None = None

    @property
    def stream(self) -> Stream:
        if self.events is None:
            self.events = []
            self.events = CopyFence().events()
        return self._stream


def test_a_batch_may_be_dropped_while_events_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(SimulatedDevice()) as device:
        copier = _Collecting(device.Stream())
        monkeypatch.setattr(copy_fence, "copying", WeakSet([copier]))
        assert len(CopyFence().events()) == 2
        assert copier.events is not None
        assert len(copier.events) == 2


def test_copy_fence_records_events_while_another_thread_begins_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(SimulatedDevice()):
        copier = _Replaced()
        monkeypatch.setattr(copy_fence, "copying", WeakSet([copier]))
        assert len(CopyFence().events()) == 1 + 1
        copier.thread.join()
        assert set(copy_fence.copying) == {copier, copier.added}
