"""The doctor: versions and limits of this machine, with advice where one is a problem, also for bug reports."""

import importlib
import platform
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_feed.extras import installed_version
from lightning_feed.load.machine import read_machine
from lightning_feed.measure.cpu_time import others_pct_now
from lightning_feed.measure.measurements import OTHERS_PCT
from lightning_feed.wording import plural, size_text

SCHEMA = "lightning_feed.doctor/1"
WIDTH = 110
NOT_KNOWN = "not known"
PACKAGES = ("lightning-feed", "torch", "torchvision", "lightning", "pytorch-lightning")
DECODERS = (
    *("simplejpeg", "turbojpeg", "opencv-python-headless", "opencv-python", "Pillow"),
    *("nvidia-dali-cuda120", "nvidia-dali-cuda130"),
)
"""Packages that decode images."""
BATCH_BYTES = 64 * 3 * 224 * 224 * 4
"""Bytes of the batch for which /dev/shm is checked: 64 images of 224 x 224 in float32, 38.5 MB."""
BATCHES_PER_WORKER = 2
"""DataLoader's default prefetch_factor."""
LITTLE_MEMORY_BYTES = 2 << 30
FEW_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """One line of the output."""

    topic: str
    """The subject, in a word or two."""
    value: str
    """The value, with its unit; ``"not known"`` if it could not be read."""
    advice: str = ""
    """The problem, and its fix; empty if nothing is wrong."""


def versions(_: Path) -> Iterator[Finding]:
    """Versions of Python and of the packages that matter."""
    yield Finding("Python", f"{platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        version = installed_version(name)
        if version is not None:
            yield Finding(name, version)


def cpus(root: Path) -> Iterator[Finding]:
    """The number of usable CPUs, the start method of workers, torch's threads, and the CPU use of other programs."""
    machine = read_machine(root)
    usable = machine.usable_cpus
    advice = ""
    if usable < 2:
        advice = "Loading and training share one CPU. Give the process or its container more CPUs."
    yield Finding("CPUs", f"{usable} usable ({machine.cpu_reason})", advice)
    yield Finding("workers start", machine.start_method)
    threads = int(importlib.import_module("torch").get_num_threads())
    advice = ""
    if threads > usable:
        advice = f"More than the usable CPUs. Set OMP_NUM_THREADS={usable}, or call torch.set_num_threads({usable})."
    yield Finding("torch threads", str(threads), advice)
    others_pct = others_pct_now(usable, root)
    if others_pct is not None:
        advice = ""
        if others_pct >= OTHERS_PCT:
            advice = "They slow training and loading down. Measure again without them before you trust a figure."
        yield Finding("other programs", f"{others_pct:.0f} % of the CPUs", advice)


def memory(root: Path) -> Iterator[Finding]:
    """Available memory, and /dev/shm, through which workers hand over their batches."""
    machine = read_machine(root)
    available = machine.available_memory_bytes
    if available is None:
        yield Finding("memory", NOT_KNOWN)
    else:
        advice = ""
        if available < LITTLE_MEMORY_BYTES:
            advice = "Workers or a cache may be killed. Use fewer workers, or raise the limit."
        yield Finding("memory", f"{size_text(available)} available", advice)
    free = machine.free_shm_bytes
    if free is None:
        yield Finding("/dev/shm", NOT_KNOWN)
        return
    wanted = machine.usable_cpus * BATCHES_PER_WORKER
    advice = ""
    if free < wanted * BATCH_BYTES:
        advice = (
            f"Workers die with a bus error when it is full: {wanted} batches of 64 x 3 x 224 x 224 float32, two for "
            f"each CPU, need {size_text(wanted * BATCH_BYTES)}. Docker: --shm-size=8g or --ipc=host. Kubernetes: an "
            "emptyDir with medium: Memory at /dev/shm."
        )
    yield Finding("/dev/shm", f"{size_text(free)} free", advice)


def hand_over(_: Path) -> Iterator[Finding]:
    """The way in which worker processes hand over batches, and if the GPU can copy directly from that memory."""
    torch = importlib.import_module("torch")
    slots = importlib.import_module("lightning_feed.load.slots")
    try:
        slots.SlotMemory(1)
    except OSError as error:
        yield Finding("batches", f"handed over as torch does it, each in new shared memory: {error}")
        return
    if not torch.cuda.is_available():
        yield Finding("batches", "handed over in slots")
        return
    torch.cuda.init()
    if slots.can_register():
        yield Finding("batches", "handed over in slots, from which the device copies without waiting")
        return
    resource: Any = importlib.import_module("resource")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else size_text(limit)
    yield Finding(
        "batches",
        f"handed over in slots, and copied by a thread that pins them; locked memory: {allowed}",
        "The driver does not register shared memory. Raise the limit of locked memory (ulimit -l unlimited; Docker: "
        "--ulimit memlock=-1).",
    )


def open_files(_: Path) -> Iterator[Finding]:
    """The limit on open files."""
    resource: Any = importlib.import_module("resource")  # not on every system
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield Finding("open files", "unlimited")
        return
    advice = ""
    if soft < FEW_FILES:
        advice = (
            "Each tensor from a worker keeps a file open, which may end in the error: Too many open files. Raise the "
            'limit (ulimit -n 65536), or call torch.multiprocessing.set_sharing_strategy("file_system").'
        )
    yield Finding("open files", f"{soft} (may be raised to {hard})", advice)


def gpus(_: Path) -> Iterator[Finding]:
    """The driver and the GPUs, from NVML."""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        yield Finding("GPU", "none that has a driver of NVIDIA's")
        return
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion())  # 12040 is 12.4
        driver = (number // 1000, number % 1000 // 10)
        built = importlib.import_module("torch").version.cuda
        advice = ""
        if built is not None and driver[0] < int(built.partition(".")[0]):
            advice = f"Too old for torch, which is built for CUDA {built}. Update the driver, or install another torch."
        version = _text(nvml.nvmlSystemGetDriverVersion())
        yield Finding("driver", f"{version}, CUDA {driver[0]}.{driver[1]} at most; torch has CUDA {built}", advice)
        for index in range(nvml.nvmlDeviceGetCount()):
            yield Finding(f"GPU {index}", _text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index))))
    finally:
        nvml.nvmlShutdown()


def decoders(_: Path) -> Iterator[Finding]:
    """The installed packages that decode images."""
    known = {name: installed_version(name) for name in DECODERS}
    installed = [f"{name} {version}" for name, version in known.items() if version is not None]
    advice = ""
    if known["simplejpeg"] is None or known["turbojpeg"] is None:
        advice = "A faster one may be missing: pip install 'lightning-feed[images]'"
    yield Finding("decoders", ", ".join(installed) or "none", advice)


CHECKS: dict[str, Callable[[Path], Iterator[Finding]]] = {
    "versions": versions, "GPU": gpus, "CPUs": cpus, "memory": memory, "batches": hand_over,
    "open files": open_files, "decoders": decoders,
}  # fmt: skip
"""Checks by topic. The topic is shown if the check fails."""


def examine(root: Path = Path("/")) -> list[Finding]:
    """Check everything that matters for feeding a GPU. Takes about as long as ``import torch``, and half a second.

    A check that fails is a finding, too. The other checks still run.

    Args:
        root: the file system to read ``proc``, ``sys`` and ``dev/shm`` from.
    """
    findings: list[Finding] = []
    for topic, check in CHECKS.items():
        try:
            findings += check(root)
        except Exception as error:  # noqa: BLE001  # any broken source is a finding of its own
            findings.append(Finding(topic, f"{NOT_KNOWN}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"))
    return findings


def as_text(findings: Sequence[Finding]) -> str:
    """Findings as text: each value, with the advice below it if something is wrong."""
    width = max(len(finding.topic) for finding in findings) + 2
    lines: list[str] = []
    for finding in findings:
        below = " " * width
        lines += _wrapped(f"{finding.topic:<{width}}", below, finding.value)
        lines += _wrapped(f"{below}-> ", f"{below}   ", finding.advice)
    wrong = sum(bool(finding.advice) for finding in findings)
    last = "Nothing to fix."
    if wrong:
        last = f"{plural(wrong, 'thing')} to fix, at the arrows."
    return "\n".join([*lines, "", last])


def _wrapped(head: str, below: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )


def as_plain(findings: Sequence[Finding]) -> dict[str, Any]:
    """The output of ``--json``: ``schema`` and ``findings``, in the order of the checks."""
    return {"schema": SCHEMA, "findings": [asdict(finding) for finding in findings]}


def _text(name: str | bytes) -> str:
    if isinstance(name, bytes):
        return name.decode()
    return name
