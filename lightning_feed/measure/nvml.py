"""GPU figures from NVML, sampled on a separate thread: a cross-check of the verdict, never its basis."""

import importlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_feed.measure.stats import GpuStats

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
LEAST_SAMPLES = 2
"""Smallest number of samples for a mean over a run."""
JOIN_S = 5.0
MIB = 1 << 20


class NvmlSampler:
    """Samples one GPU until :meth:`stop`. A failure ends the sampling and is logged once at INFO.

    Args:
        uuid: the device's UUID from torch. Its index in NVML may be another one because of ``CUDA_VISIBLE_DEVICES``.
        stretch: returns the number of the present stretch of steps without a break, such as a validation; None outside
            of the steps. Called by the sampling thread.
        period_s: seconds between two samples.
    """

    def __init__(self, uuid: str, *, stretch: Callable[[], int | None] = lambda: 0, period_s: float = PERIOD_S) -> None:
        self._uuid = uuid
        self._stretch = stretch
        self._period_s = period_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}
        self._last_stretch: int | None = None
        """The stretch of steps at the last sample."""
        self.forget_steps()
        self._thread = threading.Thread(target=self._run, name="lightning-feed-nvml", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Waits at most a few seconds if the driver hangs."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def take(self) -> GpuStats | None:
        """Return the means of the samples since the last call; None without a sample."""
        with self._lock:
            sums = self._sums
            self._sums = {}
        if not sums:
            return None
        return GpuStats(**{name: total / count for name, (total, count) in sums.items()})

    def forget_steps(self) -> None:
        """Begin :meth:`steady_util_pct` anew."""
        with self._lock:
            self._steady_util_pct = 0.0
            self._steady_samples = 0

    def steady_util_pct(self) -> float | None:
        """Return the mean GPU utilization in percent, over all samples within stretches of steps; None if there are too
        few.

        It is the share of the time in which at least one kernel ran (NVML's documentation of
        ``nvmlDeviceGetUtilizationRates``), over the last second or less. So a sample counts if the sample before it was
        in the same stretch.
        """
        with self._lock:
            samples = self._steady_samples
            return self._steady_util_pct / samples if samples >= LEAST_SAMPLES else None

    def _run(self) -> None:
        try:
            pynvml = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            try:
                with _readings(pynvml, find_handle(pynvml, self._uuid)) as readings:
                    while readings and not self._stopped.wait(self._period_s):
                        self._sample(readings, pynvml)
                    if not readings:
                        logger.info("No GPU figures from NVML: it has none for the GPU %s", self._uuid)
            finally:
                pynvml.nvmlShutdown()
        except Exception as error:  # noqa: BLE001  # a failure to measure must not end training, but is logged
            logger.info("No GPU figures from NVML: %s: %s", type(error).__name__, error)

    def _sample(self, readings: dict[str, Callable[[], float]], pynvml: Any) -> None:
        before = self._last_stretch
        self._last_stretch = self._stretch()
        is_steady = before is not None and before == self._last_stretch
        for name, read in list(readings.items()):
            try:
                value = read()
            except pynvml.NVMLError as error:
                logger.debug("NVML does not give %s: %s", name, error)
                if isinstance(error, pynvml.NVMLError_NotSupported):  # this GPU will never report this figure
                    del readings[name]
                continue
            if not math.isfinite(value):  # no error, but no figure, either: the next sample may have a figure
                continue
            with self._lock:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1
                if name == "util_pct" and is_steady:
                    self._steady_util_pct += value
                    self._steady_samples += 1


def find_handle(pynvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU, or of the MIG instance, with this UUID.

    Args:
        pynvml: the module ``pynvml``.
        uuid: the UUID, with or without NVML's prefix ``GPU-`` or ``MIG-``; torch returns it without.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")


@contextmanager
def _readings(pynvml: Any, handle: Any) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield a dict from fields of :class:`GpuStats` to the functions that read them."""
    readings: dict[str, Callable[[], float]] = {
        "util_pct": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "mem_used_mib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / MIB,
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "pcie_rx_mb_per_s": lambda: (
            pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES) / 1e3  # KB/s
        ),
    }
    with ExitStack() as stack:
        try:
            # The GPU performance monitor exists from Hopper on, in newer drivers and bindings.
            if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                busy = _SmActivity(pynvml, handle)
                stack.callback(busy.close)
                readings["sm_pct"] = busy.read
        except (AttributeError, pynvml.NVMLError) as error:
            logger.debug("NVML gives no SM activity: %s", error)
        yield readings


class _SmActivity:
    """Share of busy multiprocessors between two reads: NVML needs two samples of its counters for a figure."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml = pynvml
        self._handle = handle
        self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        pynvml.nvmlGpmSampleGet(handle, self._samples[0])

    def read(self) -> float:
        """Return the percentage of multiprocessors that were busy since the last call."""
        pynvml = self._pynvml
        earlier, later = self._samples
        pynvml.nvmlGpmSampleGet(self._handle, later)
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = 1
        request.sample1 = earlier
        request.sample2 = later
        request.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
        pynvml.nvmlGpmMetricsGet(request)
        self._samples.reverse()
        metric = request.metrics[0]
        if metric.nvmlReturn != pynvml.NVML_SUCCESS:  # a metric can fail although the call succeeds
            raise pynvml.NVMLError(metric.nvmlReturn)
        return float(metric.value)

    def close(self) -> None:
        """Free the samples in NVML."""
        for sample in self._samples:
            self._pynvml.nvmlGpmSampleFree(sample)
