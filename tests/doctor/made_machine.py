"""A machine made of files and fakes, with nothing wrong until a test says so."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_feed.doctor import Sources

GIB = 1 << 30
MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nSwapTotal: 8388608 kB\nSwapFree: 8388608 kB\n"


class FakeNvmlError(Exception):
    """What the bindings raise."""


class FakeNvml:
    """One board in good order; each figure may be replaced, by an error too."""

    NVMLError = FakeNvmlError

    def __init__(self, **figures: Any) -> None:
        self.figures = {"cuda": 12080, "width": 16, "most_width": 16, "gen": 4, "most_gen": 4, "util": 0} | figures
        self.open = 0

    def _figure(self, name: str) -> Any:
        value = self.figures[name]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlInit(self) -> None:
        self._figure("gen") if self.figures.get("no_init") else None
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self._figure("cuda")

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "A Board"

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return self._figure("width")

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self._figure("most_width")

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return self._figure("gen")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self._figure("most_gen")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self._figure("util"))

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=b"00000000:65:00.0")


def unpinnable(*args: Any, **options: Any) -> Any:
    """torch.empty of a machine that cannot pin."""

    def pin() -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    return SimpleNamespace(pin_memory=pin)


def fake_torch(*, threads: int = 2, cuda: str | None = "12.6", available: bool = True, empty: Any = None) -> Any:
    """The few things asked of torch."""
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: available),
        get_num_threads=lambda: threads,
        uint8="uint8",
        empty=empty or (lambda *a, **k: SimpleNamespace(pin_memory=lambda: None)),
        ops=SimpleNamespace(image=SimpleNamespace(decode_jpegs_cuda=None)),
    )


def write(root: Path, files: Mapping[str, str]) -> None:
    """Files of ``proc`` and ``sys``."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def made_machine(root: Path, **changes: Any) -> Sources:
    """Sources in good order, but for the changes."""
    write(root, {"proc/meminfo": MEMINFO, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n"})
    write(
        root,
        {
            "sys/bus/pci/devices/0000:65:00.0/numa_node": "0\n",
            "sys/bus/pci/devices/0000:65:00.0/local_cpulist": f"0-{(os.cpu_count() or 1) + 1024}\n",
        },
    )
    modules = {
        "pynvml": FakeNvml(),
        "torch": fake_torch(),
        "PIL": SimpleNamespace(__version__="12.0"),
        "PIL.features": SimpleNamespace(check_feature=lambda name: True),
        "cv2": SimpleNamespace(getNumThreads=lambda: 1),
        "torchvision.version": SimpleNamespace(cuda=12060),
        "torchvision.io": SimpleNamespace(),
        **changes.pop("modules", {}),
    }
    versions = {"torch": "2.15.0+cu126", "torchvision": "0.29", "lightning": "2.6.6", "simplejpeg": "1.9"}
    versions |= {"turbojpeg": "1", "opencv-python": "5", "nvidia-dali-cuda120": "2.4.0"}
    versions |= changes.pop("versions", {})
    return Sources(
        **(
            {
                "root": root,
                "environ": {},
                "load": loader(modules),
                "version": versions.get,
                "requirements": lambda: ["torch>=2.6", "lightning>=2.4", 'pytorch_lightning>=2.4; extra == "pl"'],
                "limit": {"NOFILE": (65536, 65536), "MEMLOCK": (-1, -1)}.__getitem__,
                "wait": lambda seconds: None,
                "space": lambda folder: (64 * GIB, 32 * GIB, 32 * GIB),
            }
            | changes
        )
    )


def loader(modules: Mapping[str, Any]) -> Callable[[str], Any]:
    """An import that knows these modules; an exception in their place is raised."""

    def load(name: str) -> Any:
        found = modules[name]
        if isinstance(found, Exception):
            raise found
        return found

    return load
