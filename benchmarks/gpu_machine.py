"""Facts about this machine and its GPU, as JSON. A process of its own: a broken driver may hang, or end it."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from lightning_feed.extras import installed_version
from lightning_feed.load.machine import read_machine


def machine_facts() -> dict[str, Any]:
    """The GPU, None where there is none; driver, versions and CPUs."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else None,
        "driver": driver() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "torchvision": installed_version("torchvision"),
        "lightning": installed_version("lightning"),
        "python": platform.python_version(),
        "cpus": read_machine().usable_cpus,
        "cpu": cpu_model(),
    }


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


if __name__ == "__main__":
    print(json.dumps(machine_facts()))
