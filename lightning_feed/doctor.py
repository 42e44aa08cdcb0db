"""The doctor: versions and limits of this machine, with advice where one is a problem, also for bug reports."""

import platform
import resource
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pynvml
import torch

from lightning_feed.extras import installed_version
from lightning_feed.machine.limits import read_machine
from lightning_feed.measure.cpu_time import others_pct_now
from lightning_feed.measure.measurements import OTHERS_PCT
from lightning_feed.wording import size_text

PACKAGES = (
    *("lightning-feed", "torch", "torchvision", "lightning", "pytorch-lightning"),
    *("simplejpeg", "turbojpeg", "opencv-python-headless", "Pillow", "nvidia-dali-cuda120", "nvidia-dali-cuda130"),
)
BATCH_BYTES = 64 * 3 * 224 * 224 * 4
"""Bytes of the batch for which /dev/shm is checked: 64 images of 224 x 224 in float32, 38.5 MB."""


@dataclass(frozen=True)
class Finding:
    """One line of the output."""

    topic: str
    """The subject, in a word or two."""
    value: str
    """The value, with its unit."""
    advice: str = ""
    """The problem, and its fix; empty if nothing is wrong."""

    def only_if(self, wrong: object) -> "Finding":
        """Return the finding, without its advice unless something is wrong."""
        return self if wrong else replace(self, advice="")


def examine(root: Path = Path("/")) -> list[Finding]:
    """Look at everything that matters for feeding a GPU. Takes about as long as ``import torch``, and half a second.

    Args:
        root: the file system to read ``proc``, ``sys`` and ``dev/shm`` from.
    """
    checks = (_versions, _gpus, _cpus, _memory)
    return [finding for check in checks for finding in _findings(check, root)]


def _findings(check: Callable[[Path], Iterable[Finding]], root: Path) -> Iterator[Finding]:
    try:
        yield from check(root)
    except Exception as error:  # noqa: BLE001  # on a broken machine the other checks still run
        yield Finding(check.__name__.strip("_"), f"not known: {type(error).__name__}: {error}")


def _versions(_: Path) -> list[Finding]:
    return [
        Finding("Python", f"{platform.python_version()}, {platform.platform()}"),
        *(Finding(name, version) for name in PACKAGES if (version := installed_version(name))),
    ]


def _gpus(_: Path) -> Iterator[Finding]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield Finding("GPU", "none with an NVIDIA driver")
        return
    cuda = pynvml.nvmlSystemGetCudaDriverVersion() // 1000  # 12040 is 12.4
    built = torch.version.cuda or "0"
    yield Finding(
        "driver",
        f"{pynvml.nvmlSystemGetDriverVersion()}, for CUDA {cuda}",
        f"Too old for torch, which is built for CUDA {built}. Update the driver, or install another torch.",
    ).only_if(cuda < int(built.partition(".")[0]))
    for index in range(pynvml.nvmlDeviceGetCount()):
        yield Finding(f"GPU {index}", str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))))


def _cpus(root: Path) -> list[Finding]:
    machine = read_machine(root)
    usable = machine.usable_cpus
    threads = torch.get_num_threads()
    others_pct = others_pct_now(usable, root) or 0.0
    return [
        Finding(
            "CPUs",
            f"{usable} usable ({machine.cpu_reason})",
            "Loading and training share one CPU. Give the process or its container more CPUs.",
        ).only_if(usable < 2),
        Finding(
            "torch threads",
            str(threads),
            f"More than the usable CPUs. Set OMP_NUM_THREADS={usable}, or call torch.set_num_threads({usable}).",
        ).only_if(threads > usable),
        Finding(
            "other programs",
            f"{others_pct:.0f} % of the CPUs",
            "They slow training and loading down. Measure again without them before you trust a figure.",
        ).only_if(others_pct >= OTHERS_PCT),
    ]


def _memory(root: Path) -> list[Finding]:
    machine = read_machine(root)
    shm_bytes = 2 * machine.usable_cpus * BATCH_BYTES
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    rooms = [
        (
            "memory",
            machine.available_memory_bytes,
            "available",
            2 << 30,
            "Workers or a cache may be killed. Use fewer workers, or raise the limit.",
        ),
        (
            "/dev/shm",
            machine.free_shm_bytes,
            "free",
            shm_bytes,
            "Workers die with a bus error when it is full: two batches of 64 x 3 x 224 x 224 float32 for each CPU need "
            f"{size_text(shm_bytes)}. Docker: --shm-size=8g or --ipc=host. Kubernetes: an emptyDir with medium: "
            "Memory at /dev/shm.",
        ),
    ]
    return [
        *(
            Finding(topic, f"{size_text(size_bytes)} {state}", advice).only_if(size_bytes < least_bytes)
            for topic, size_bytes, state, least_bytes, advice in rooms
            if size_bytes is not None
        ),
        Finding(
            "open files",
            str(files),
            "Each tensor from a worker keeps a file open, which may end in the error: Too many open files. Raise the "
            'limit (ulimit -n 65536), or call torch.multiprocessing.set_sharing_strategy("file_system").',
        ).only_if(0 <= files < 1024),
    ]


def as_text(findings: Sequence[Finding]) -> str:
    """Return the findings as text: each value, with the advice below it if something is wrong."""
    indent = " " * (2 + max(len(finding.topic) for finding in findings))
    lines = []
    for finding in findings:
        lines.append(f"{finding.topic:<{len(indent)}}{finding.value}")
        lines += textwrap.wrap(finding.advice, 110, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ")
    return "\n".join(lines)
