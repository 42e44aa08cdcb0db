"""Device modules of other accelerators, with the names and signatures that their sources have, and training on them.

Tensors lie on the CPU: what is tried is which of the modules' names are called, and how.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.overrides import TorchFunctionMode

# --- XPU ----------------------------------------------------------------------------------------------------------


class Xpu:
    """torch 2.6 and 2.15, ``torch/xpu/streams.py`` and ``torch/xpu/__init__.py``, as far as both have it.

    Work is done when it is queued. Whether the order between streams was asked for can be seen in :attr:`waits`.
    """

    def __init__(self) -> None:
        self.compute = self.now = XpuStream(self)
        self.side: list[XpuStream] = []
        self.waits: list[tuple[XpuStream, XpuStream]] = []
        """(stream that waits, stream that it waits for), in order."""
        self.timing_events = 0

    def Stream(self, device: Any = None, priority: int = 0) -> "XpuStream":
        assert device.type == "xpu"
        self.side.append(XpuStream(self))
        return self.side[-1]

    def Event(self, enable_timing: bool = False) -> "XpuEvent":
        self.timing_events += enable_timing
        return XpuEvent(self, enable_timing=enable_timing)

    @contextmanager
    def stream(self, stream: "XpuStream | None") -> Iterator[None]:
        before, self.now = self.now, stream or self.now
        try:
            yield
        finally:
            self.now = before

    def current_stream(self, device: Any = None) -> "XpuStream":
        return self.now

    def synchronize(self, device: Any = None) -> None:
        raise AssertionError("the host waits for the device")


class XpuStream:
    def __init__(self, xpu: Xpu) -> None:
        self.xpu = xpu

    def record_event(self, event: "XpuEvent | None" = None) -> "XpuEvent":
        event = event or self.xpu.Event()
        event.record(self)
        return event

    def wait_event(self, event: "XpuEvent") -> None:
        event.wait(self)

    def wait_stream(self, stream: "XpuStream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.xpu.synchronize()


class XpuEvent:
    def __init__(self, xpu: Xpu, *, enable_timing: bool) -> None:
        self._xpu, self._timed = xpu, enable_timing
        self._on: XpuStream | None = None
        self._at = 0.0

    def record(self, stream: XpuStream | None = None) -> None:
        self._on, self._at = stream or self._xpu.current_stream(), time.monotonic()

    def wait(self, stream: XpuStream | None = None) -> None:
        assert self._on is not None, "waits for an event that was never recorded"
        self._xpu.waits.append((stream or self._xpu.current_stream(), self._on))

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "XpuEvent") -> float:
        if not (self._timed and end_event._timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return (end_event._at - self._at) * 1e3

    def synchronize(self) -> None:
        """It has passed."""


# --- training -----------------------------------------------------------------------------------------------------


class SaysDevice(SingleDeviceStrategy):
    """Trains on the CPU, and says that it is another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=torch.device("cpu"))
        self._said = device

    @property
    def root_device(self) -> torch.device:
        return self._said

    def setup_environment(self) -> None:
        """The accelerator's, which would refuse the device."""


class OnCpu(TorchFunctionMode):
    """While entered, what is made on a device of this kind, or moved there, lies on the CPU."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def cpu(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == self.kind else value

        return func(*map(cpu, args), **{name: cpu(value) for name, value in (kwargs or {}).items()})


def register(monkeypatch: pytest.MonkeyPatch, kind: str, module: Any) -> None:
    """Let ``module`` be what torch finds for devices of this kind; None: the package that brings it is not there."""
    find = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        if not isinstance(device, torch.device) or device.type != kind:
            return find(device)
        if module is None:  # as torch says it
            raise RuntimeError(f"Device '{kind}' does not have a corresponding module registered as 'torch.{kind}'.")
        return module

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
