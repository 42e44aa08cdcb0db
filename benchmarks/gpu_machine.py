"""Facts about this machine and its GPU, as JSON. A process of its own: a broken driver may hang, or end it."""

import json
import platform
from typing import Any

import torch
from backend_machine import cpu_model, driver, installed

from lightning_feed.load.machine import read_machine


def machine_facts() -> dict[str, Any]:
    """The GPU, None where there is none; driver, versions and CPUs."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else None,
        "driver": driver() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "torchvision": installed("torchvision"),
        "lightning": installed("lightning"),
        "python": platform.python_version(),
        "cpus": read_machine().usable_cpus,
        "cpu": cpu_model(),
    }


if __name__ == "__main__":
    print(json.dumps(machine_facts()))
