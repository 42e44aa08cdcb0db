"""Where a run took place: versions and machine, so that two reports can be held against each other."""

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_feed.load.machine import read_machine


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions and machine. None: not installed, or not known."""

    lightning_feed: str | None = None
    python: str | None = None
    torch: str | None = None
    torchvision: str | None = None
    lightning: str | None = None
    pytorch_lightning: str | None = None
    platform: str | None = None
    """Operating system and C library, as Python names them."""
    cpu: str | None = None
    """Model of the CPU."""
    device: str | None = None
    """Model of the GPU."""
    usable_cpus: int | None = None
    """CPUs that the process may keep busy."""
    cpu_reason: str | None = None
    """The limit that gave ``usable_cpus``."""
    available_memory_bytes: int | None = None
    """Memory that could be taken when the report was written."""
    free_shm_bytes: int | None = None
    """Free space of /dev/shm then."""
    start_method: str | None = None
    """How worker processes start: ``fork``, ``forkserver`` or ``spawn``."""


def read_environment(root: Path = Path("/")) -> Environment:
    """Versions of what is installed, and the limits of this process.

    The GPU is named only where CUDA is in use already: asking would start it.

    Args:
        root: the file system to read ``proc``, ``sys`` and ``dev/shm`` from.
    """
    machine = read_machine(root)
    return Environment(
        lightning_feed=_version("lightning-feed"),
        python=platform.python_version(),
        torch=_version("torch"),
        torchvision=_version("torchvision"),
        lightning=_version("lightning"),
        pytorch_lightning=_version("pytorch-lightning"),
        platform=platform.platform(),
        cpu=_cpu_model(root),
        device=_device(),
        usable_cpus=machine.usable_cpus,
        cpu_reason=machine.cpu_reason,
        available_memory_bytes=machine.available_memory_bytes,
        free_shm_bytes=machine.free_shm_bytes,
        start_method=machine.start_method,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model(root: Path) -> str | None:
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or None


def _device() -> str | None:
    torch = sys.modules.get("torch")  # importing it takes a second, and without it nothing runs on a device
    if torch is None or not torch.cuda.is_initialized():
        return None
    return str(torch.cuda.get_device_name())
