"""NVML on its own thread, against a module that pretends to be it."""

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_feed.measure.nvml import NvmlSampler
from lightning_feed.measure.stats import GpuStats

UUID = "ba4d9f52-91d3-4d3f-9a1e-3f6a0e0a1234"


class FakeNvmlError(Exception):
    """What the bindings raise: of a class of its own for each number that they know."""

    def __new__(cls, value: Any) -> "FakeNvmlError":
        return super().__new__(FakeNotSupported if value == FakeNvml.NVML_ERROR_NOT_SUPPORTED else cls)

    def __str__(self) -> str:
        known = {FakeNvml.NVML_ERROR_NOT_SUPPORTED: "Not Supported"}
        return known.get(self.args[0], str(self.args[0]))


class FakeNotSupported(FakeNvmlError): ...


class FakeNvml:
    """The functions used of the module ``pynvml``, for one board, counted. Read in nvidia-ml-py 13.615.

    Args:
        prefix: of the UUID by which the board is known.
        gpm: whether the board has the performance monitor.
        cannot: calls that the board does not support.
        fail_once: calls that fail the first time, for another reason.
        sm: what the monitor gives for each pair of samples: the metric's ``nvmlReturn`` and ``value``.
    """

    NVMLError, NVMLError_NotSupported = FakeNvmlError, FakeNotSupported
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_PCIE_UTIL_RX_BYTES = 1
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2

    def __init__(
        self,
        *,
        prefix: str = "GPU-",
        gpm: bool = True,
        cannot: tuple[str, ...] = (),
        fail_once: tuple[str, ...] = (),
        sm: tuple[tuple[int, float], ...] = ((0, 25.0),),
    ) -> None:
        self.prefix, self.gpm, self.cannot, self.fail_once = prefix, gpm, cannot, fail_once
        self.sm = itertools.cycle(sm)
        self.calls: list[str] = []
        self.open = self.samples = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.cannot:
            raise FakeNotSupported(f"{name}: Not Supported")
        if name in self.fail_once and self.calls.count(name) == 1:
            raise FakeNvmlError(f"{name}: Unknown Error")

    def nvmlInit(self) -> None:
        self._call("init")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.prefix + UUID:
            raise FakeNvmlError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._call("util")
        return SimpleNamespace(gpu=40 if self.calls.count("util") == 1 else 60)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._call("memory")
        return SimpleNamespace(used=3 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._call("power")
        return 250_000

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        assert counter == self.NVML_PCIE_UTIL_RX_BYTES
        self._call("pcie")
        return 1_500_000

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self) -> list[int]:
        self.samples += 1
        return [0]

    def nvmlGpmSampleGet(self, handle: str, sample: list[int]) -> None:
        self._call("gpm")
        sample[0] = self.calls.count("gpm")

    def nvmlGpmSampleFree(self, sample: list[int]) -> None:
        self.samples -= 1

    @staticmethod
    def c_nvmlGpmMetricsGet_t() -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0)])

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        self._call("metrics")
        assert request.version == 1
        assert request.numMetrics == 1
        assert request.metrics[0].metricId == self.NVML_GPM_METRIC_SM_UTIL
        assert request.sample2[0] > request.sample1[0], "the newer sample comes second"
        request.metrics[0].nvmlReturn, request.metrics[0].value = next(self.sm)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[GpuStats | None, NvmlSampler]]]:
    """``sampled(nvml, rounds)``: what a sampler saw in that many rounds."""

    def run(nvml: Any, rounds: int = 2) -> tuple[GpuStats | None, NvmlSampler]:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        sampler = NvmlSampler(UUID, period_s=0)
        left = iter([False] * rounds + [True])
        monkeypatch.setattr(sampler._stopped, "wait", lambda _: next(left))
        sampler.start()
        sampler._thread.join(10)
        assert not sampler._thread.is_alive()
        return sampler.take(), sampler

    yield run
    assert not [thread for thread in threading.enumerate() if thread.name == "lightning-feed-nvml"]


def test_gpu_stats_are_the_means_of_the_nvml_samples(sampled: Callable[..., Any]) -> None:
    nvml = FakeNvml()
    stats, sampler = sampled(nvml)
    assert stats == GpuStats(util_pct=50.0, sm_pct=25.0, mem_used_mib=3072.0, power_w=250.0, pcie_rx_mb_per_s=1500.0)
    assert sampler.take() is None
    assert (nvml.open, nvml.samples) == (0, 0)


def test_utilization_counts_only_between_two_samples_of_one_stretch_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    utils = iter([10, 20, 30, 40, 50, 60, 70])
    nvml.nvmlDeviceGetUtilizationRates = lambda _: SimpleNamespace(gpu=next(utils))  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    stretches = iter([None, 1, 1, None, 3, 3, 4])  # between 3 and 4 there was a break that no sample saw
    sampler = NvmlSampler(UUID, stretch=lambda: next(stretches), period_s=0)
    left = iter([False] * 7 + [True])
    monkeypatch.setattr(sampler._stopped, "wait", lambda _: next(left))
    sampler.start()
    sampler._thread.join(10)
    assert sampler.steady_util_pct() == 45  # of the third sample, 30, and the sixth, 60
    sampler.forget_steps()
    assert sampler.steady_util_pct() is None


def test_one_sample_gives_no_utilization_of_the_run(sampled: Callable[..., Any]) -> None:
    _, sampler = sampled(FakeNvml(), rounds=2)  # the first one follows no other
    assert sampler.steady_util_pct() is None


def test_an_unsupported_figure_is_absent_and_queried_only_once(sampled: Callable[..., Any]) -> None:
    nvml = FakeNvml(gpm=False, cannot=("power",))
    stats, _ = sampled(nvml, rounds=3)
    assert stats.power_w is None
    assert stats.sm_pct is None
    assert stats.mem_used_mib == 3072.0
    assert nvml.calls.count("power") == 1


def test_a_mig_instance_is_found_by_its_uuid_prefix(sampled: Callable[..., Any]) -> None:
    stats, _ = sampled(FakeNvml(prefix="MIG-", cannot=("util",)))
    assert stats.util_pct is None
    assert stats.mem_used_mib == 3072.0


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (None, "ModuleNotFoundError"),
        (FakeNvml(cannot=("init",)), "init: Not Supported"),
        (FakeNvml(prefix="no such "), "Not Found"),
        (FakeNvml(gpm=False, cannot=("util", "memory", "power", "pcie")), "it has none"),
    ],
    ids=["module absent", "driver absent", "unknown device", "nothing supported"],
)
def test_missing_nvml_logs_one_info_line_and_gives_no_figures(
    nvml: Any, said: str, sampled: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        stats, sampler = sampled(nvml)
    assert stats is None
    (line,) = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert (line.levelno, said in line.getMessage()) == (logging.INFO, True)
    sampler.stop()
    if nvml is not None:
        assert nvml.open == 0


def test_an_nvml_failure_ends_the_sampler_thread_and_is_logged_once(
    sampled: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml()

    def broken(handle: str) -> int:
        raise OSError("the driver went away")

    nvml.nvmlDeviceGetPowerUsage = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        sampled(nvml, rounds=5)
    assert [record.getMessage() for record in caplog.records] == [
        "No GPU figures from NVML: OSError: the driver went away"
    ]
    assert (nvml.open, nvml.samples) == (0, 0)


def test_stop_ends_the_sampler_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    sampler = NvmlSampler(UUID, period_s=60)
    sampler.stop()  # before it was started: nothing to end
    sampler = NvmlSampler(UUID, period_s=60)
    sampler.start()
    sampler.stop()
    assert not sampler._thread.is_alive()
