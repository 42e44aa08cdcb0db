"""GPU, driver, its PCIe link and its NUMA node, as NVML and torch know them."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

from lightning_feed.archive.memory import read_text
from lightning_feed.archive.stage_room import size_text
from lightning_feed.watch.doctor.finding import NOT_KNOWN, Finding
from lightning_feed.watch.doctor.sources import Sources

BUSY_PCT = 30
"""NVML's utilisation above which a GPU no longer lowers its link to save power."""


def gpus(sources: Sources) -> Iterator[Finding]:
    """Driver and boards by NVML; a board's link and node each on their own."""
    try:
        nvml = sources.load("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001  # NVMLError is a class of the module that may be missing; said below
        yield Finding(topic="GPU", value=NOT_KNOWN, level="note", meaning=f"NVML: {_said(error)}")
        return
    try:
        yield from _driver(nvml, sources)
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield Finding(topic=f"GPU {index}", value=_text(nvml.nvmlDeviceGetName(handle)))
            yield from _tolerant(f"PCIe link {index}", nvml, lambda at=handle, i=index: _link(nvml, at, i))
            yield from _tolerant(f"GPU {index} node", nvml, lambda at=handle, i=index: _node(nvml, at, i, sources))
    finally:
        nvml.nvmlShutdown()


def _tolerant(topic: str, nvml: Any, look: Any) -> Iterator[Finding]:
    try:
        yield look()
    except (nvml.NVMLError, AttributeError) as error:  # not every board, driver and binding tells everything
        yield Finding(topic=topic, value=NOT_KNOWN, meaning=f"NVML: {_said(error)}")


def _driver(nvml: Any, sources: Sources) -> Iterator[Finding]:
    version = _text(nvml.nvmlSystemGetDriverVersion())
    number = int(nvml.nvmlSystemGetCudaDriverVersion())  # 12040 is 12.4
    driver = (number // 1000, number % 1000 // 10)
    value = f"{version}, CUDA {driver[0]}.{driver[1]} at most"
    try:
        built = sources.load("torch").version.cuda
    except ImportError:
        built = None
    if built is None:
        yield Finding(topic="driver", value=value)
        return
    wanted = tuple(int(part) for part in built.split(".")[:2])
    # Within one major version of CUDA an older driver runs newer builds ("minor version compatibility").
    if driver[0] < wanted[0]:
        yield Finding(
            topic="driver",
            value=value,
            level="problem",
            meaning=f"too old for torch, which is built for CUDA {built}",
            do=f"Update the driver, or install a torch built for CUDA {driver[0]}.",
        )
    elif driver < wanted:
        yield Finding(topic="driver", value=value, level="note", meaning=f"torch is built for {built}: it runs, newer")
    else:
        yield Finding(topic="driver", value=value, meaning=f"torch is built for CUDA {built}")


def _link(nvml: Any, handle: Any, index: int) -> Finding:
    topic = f"PCIe link {index}"
    width, widest = int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)), int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    now = int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
    most = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    value = f"x{width} of x{widest}, generation {now} of {most}"
    if width < widest:
        return Finding(
            topic=topic,
            value=value,
            level="warning",
            meaning=f"copies to the GPU run at {100 * width / widest:.0f} % of the link's width",
            do="Look again while it trains; if it stays, reseat the board or use another slot or riser.",
        )
    if now < most:
        if _busy(nvml, handle):
            return Finding(
                topic=topic,
                value=value,
                level="warning",
                meaning="the GPU is busy and the link still below its best generation",
                do="Check the slot's generation in the firmware (BIOS), and the riser.",
            )
        return Finding(topic=topic, value=value, meaning="an idle GPU lowers the generation by itself: no fault")
    return Finding(topic=topic, value=value)


def _busy(nvml: Any, handle: Any) -> bool:
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) >= BUSY_PCT
    except nvml.NVMLError:
        return False  # not told: then nothing is claimed


def _node(nvml: Any, handle: Any, index: int, sources: Sources) -> Finding:
    topic = f"GPU {index} node"
    bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    domain, _, rest = bus.partition(":")
    place = sources.root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"  # NVML writes eight digits, sysfs four
    node, near = read_text(place / "numa_node"), _cpu_set(read_text(place / "local_cpulist"))
    if not node or node == "-1" or not near or not hasattr(os, "sched_getaffinity"):
        return Finding(topic=topic, value=NOT_KNOWN, meaning="the system does not tell which CPUs are near")
    ours = os.sched_getaffinity(0)
    if ours & near:
        return Finding(topic=topic, value=f"NUMA node {node}", meaning=f"{len(ours & near)} of our CPUs are near it")
    return Finding(
        topic=topic,
        value=f"NUMA node {node}",
        level="warning",
        meaning="all our CPUs belong to another node: each copy crosses between sockets",
        do=f"numactl --cpunodebind={node} --membind={node} python ...",
    )


def pinned_memory(sources: Sources) -> Iterator[Finding]:
    """The limit on locked memory, and whether pinning works here."""
    soft, _ = sources.limit("RLIMIT_MEMLOCK")
    value = "no limit" if soft == -1 else f"limit {size_text(soft)}"
    try:
        torch = sources.load("torch")
    except ImportError:
        yield Finding(topic="pinned memory", value=value, meaning="not tried: torch is not installed")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old is named above, in our words
        there = torch.cuda.is_available()
    if not there:
        yield Finding(topic="pinned memory", value=value, meaning="not tried: torch sees no CUDA device")
        return
    try:
        torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        yield Finding(
            topic="pinned memory",
            value=value,
            level="problem",
            meaning=f"1 MiB could not be pinned: {_said(error)}",
            do="Raise the limit (ulimit -l unlimited), or train with pin_memory=False.",
        )
        return
    yield Finding(topic="pinned memory", value=f"works, {value}")


def _cpu_set(text: str) -> set[int]:
    """``"0-3,8"`` as numbers; empty where it is not such a list."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return set()
        found.update(range(int(first), int(last or first) + 1))
    return found


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _said(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
