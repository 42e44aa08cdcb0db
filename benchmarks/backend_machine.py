"""The machine that a benchmark of image backends runs on, and the backends that it has."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lightning_feed.data.image_backends import check_available, require_nvjpeg
from lightning_feed.errors import FeedError
from lightning_feed.load.machine import read_machine

PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "pillow",
    "simplejpeg",
    "opencv-python-headless",
    "turbojpeg",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
)


def machine_line() -> str:
    """The GPU with its driver, or "no GPU"; the CPU, how many of them may be used, the load; and all versions."""
    cuda = torch.cuda.is_available()
    parts = [
        f"{torch.cuda.get_device_name()}, driver {driver()}, CUDA {torch.version.cuda}" if cuda else "no GPU",
        f"{read_machine().usable_cpus} CPUs ({cpu_model()}), load {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
    ]
    return "; ".join(parts) + ", " + ", ".join(f"{name} {found}" for name in PACKAGES if (found := installed(name)))


def why_missing(backend: str, device: torch.device) -> str:
    """Why a backend cannot be used on a device; "" where it can."""
    try:
        check_available(backend, device)
        if backend == "nvjpeg":
            require_nvjpeg(device)
    except FeedError as error:
        return str(error).partition("\n")[0]
    return ""


def installed(name: str) -> str | None:
    """The version of a package, None where it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver() -> str:
    """The version of the NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return "unknown"
    except pynvml.NVMLError:
        return "unknown"
    try:
        found = pynvml.nvmlSystemGetDriverVersion()
        return found.decode() if isinstance(found, bytes) else str(found)
    finally:
        pynvml.nvmlShutdown()


def cpu_model() -> str:
    """As Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
