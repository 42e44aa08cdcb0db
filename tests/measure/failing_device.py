"""A device that fails in the middle of a run, as CUDA does after an illegal memory access."""

from simulated.device import Event, SimulatedDevice


class FailingDevice(SimulatedDevice):
    """From the first call of the kind ``fails_at`` on, every call that reaches the device raises."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.fails_at, self.broken, self.reached = fails_at, False, 0

    def reach(self, call: str) -> None:
        self.reached += 1
        self.broken |= call == self.fails_at
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    def event(self) -> "FailingEvent":
        return FailingEvent(self, enable_timing=True)


class FailingEvent(Event):
    _device: FailingDevice

    def record(self) -> None:
        self._device.reach("record")
        super().record()

    def query(self) -> bool:
        self._device.reach("query")
        return super().query()

    def elapsed_time(self, end_event: Event) -> float:
        self._device.reach("elapsed_time")
        return super().elapsed_time(end_event)

    def synchronize(self) -> None:
        self._device.reach("synchronize")
        super().synchronize()
