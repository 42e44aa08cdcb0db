"""Checks of machine and environment: everything that could keep a GPU from being fed."""

import dataclasses
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from lightning_feed.doctor import NOT_KNOWN, Finding, Level, Sources
from lightning_feed.errors import SettingsError
from lightning_feed.load.machine import read_machine
from lightning_feed.measure.cpu_time import others_pct_now
from lightning_feed.measure.measurements import OTHERS_PCT
from lightning_feed.storage.file_system import file_system
from lightning_feed.storage.system import memory_limits, read_text, size_text

BATCH_BYTES = 64 * 3 * 224 * 224 * 4
"""64 images of 224 x 224 in float32, 38.5 MB: the batch size for checking /dev/shm."""
BATCHES_PER_WORKER = 2
"""DataLoader's default prefetch_factor."""
LITTLE_MEMORY_BYTES = 2 << 30
MUCH_SWAP_BYTES = 256 << 20
FEW_FILES = 1024
UNLIMITED = -1
SLOW_GOVERNORS = {"powersave", "conservative"}
SELF_SCALING_DRIVERS = {"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"}
"""With these drivers ``powersave`` is the usual governor, and raises the clock under load (kernel, pm/intel_pstate)."""
BUSY_PCT = 30
"""NVML's utilisation above which a GPU no longer lowers its link to save power."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
DECODERS = {
    "simplejpeg": ("simplejpeg",),
    "turbojpeg": ("turbojpeg",),
    "opencv": ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
    "torchvision": ("torchvision",),
}
"""Decoder -> the packages that contain it."""
DALI_PACKAGES = {12: "nvidia-dali-cuda120", 13: "nvidia-dali-cuda130"}
"""CUDA version -> DALI's package."""
OLDEST_DALI = 2


# --- CPUs, memory, limits -----------------------------------------------------------------------------------------


def cpus(sources: Sources) -> Iterator[Finding]:
    """The number of CPUs that workers can keep busy, and the limit that determines it."""
    machine = read_machine(sources.root)
    value = f"{machine.usable_cpus} usable"
    if machine.usable_cpus < 2:
        yield Finding(
            "CPUs",
            value,
            "warning",
            f"{machine.cpu_reason}; loading and training share one CPU",
            "Give the process or its container more CPUs.",
        )
    else:
        yield Finding("CPUs", value, meaning=machine.cpu_reason)
    method = machine.start_method
    slow_start = "each worker imports the program again; keep them (persistent_workers)"
    yield Finding("workers start", method, meaning="" if method == "fork" else slow_start)


def clock(sources: Sources) -> Iterator[Finding]:
    """The CPU frequency governor, if visible."""
    folder = sources.root / "sys/devices/system/cpu/cpu0/cpufreq"
    governor = read_text(folder / "scaling_governor")
    driver = read_text(folder / "scaling_driver")
    if not governor:
        yield Finding("CPU clock", NOT_KNOWN, "note", "no governor is shown, as in most virtual machines")
        return
    yield Finding(
        "CPU clock",
        f"governor {governor}",
        "warning",
        "the CPUs may stay below their full clock while they decode",
        "sudo cpupower frequency-set -g performance",
    ).only_if(governor in SLOW_GOVERNORS and driver not in SELF_SCALING_DRIVERS)


def memory(sources: Sources) -> Iterator[Finding]:
    """Available memory, and memory moved to swap."""
    limits = list(memory_limits(sources.root))
    if limits:
        yield _free_memory(*min(limits))
    else:
        yield Finding("memory", NOT_KNOWN, "note", "neither /proc/meminfo nor a cgroup shows it")
    swap = dict(re.findall(r"^(Swap\w+):\s*(\d+)", read_text(sources.root / "proc/meminfo"), re.MULTILINE))
    if not {"SwapTotal", "SwapFree"} <= swap.keys():
        yield Finding("swap", NOT_KNOWN, "note", "/proc/meminfo does not show it")
        return
    total, used = (1024 * one for one in (int(swap["SwapTotal"]), int(swap["SwapTotal"]) - int(swap["SwapFree"])))
    yield Finding(
        "swap",
        f"{size_text(used)} of {size_text(total)} used" if total else "none",
        "warning",
        "memory ran short at some time; samples read back from swap are slow",
        "Free memory: fewer workers, a smaller cache, fewer other programs.",
    ).only_if(used >= MUCH_SWAP_BYTES)


def _free_memory(left: int, reason: str) -> Finding:
    value = f"{size_text(max(0, left))} available"
    if left >= LITTLE_MEMORY_BYTES:
        return Finding("memory", value, meaning=reason)
    return Finding(
        "memory",
        value,
        "warning",
        f"{reason}; workers or a cache may be killed",
        "Use fewer workers or none that copy the dataset, or raise the limit.",
    )


def shared_memory(sources: Sources) -> Iterator[Finding]:
    """/dev/shm, through which workers hand over their batches."""
    size, _, free = sources.space(sources.root / "dev/shm")
    batches = free // BATCH_BYTES
    wanted = read_machine(sources.root).usable_cpus * BATCHES_PER_WORKER
    value = f"{size_text(free)} free of {size_text(size)}"
    room = f"room for {batches} batches of 64 x 3 x 224 x 224 float32"
    if batches >= wanted:
        yield Finding("/dev/shm", value, meaning=room)
        return
    yield Finding(
        "/dev/shm",
        value,
        "problem" if batches < BATCHES_PER_WORKER else "warning",
        f"{room}; one worker per CPU needs {wanted}, and workers die with a bus error when it is full",
        "Docker: --shm-size=8g or --ipc=host. Kubernetes: an emptyDir with medium: Memory at /dev/shm.",
    )


def open_files(sources: Sources) -> Iterator[Finding]:
    """The limit on open files."""
    soft, hard = sources.limit("NOFILE")
    now, most = ("unlimited" if one == UNLIMITED else str(one) for one in (soft, hard))
    yield Finding(
        "open files",
        now if now == most else f"{now} (may be raised to {most})",
        "warning",
        "each tensor from a worker keeps a file open, which may end in the error: Too many open files",
        f"ulimit -n {65536 if hard == UNLIMITED else min(hard, 65536)}; above that, raise the hard limit, or "
        'torch.multiprocessing.set_sharing_strategy("file_system").',
    ).only_if(soft != UNLIMITED and soft < FEW_FILES)


def container(sources: Sources) -> Iterator[Finding]:
    """The container, if any. Its limits are set when it is started."""
    first = read_text(sources.root / "proc/1/cgroup")
    signs = {
        "/.dockerenv": (sources.root / ".dockerenv").exists(),
        "/run/.containerenv": (sources.root / "run/.containerenv").exists(),
        "the variable container": bool(sources.environ.get("container")),
        "KUBERNETES_SERVICE_HOST": bool(sources.environ.get("KUBERNETES_SERVICE_HOST")),
        "/proc/1/cgroup": any(word in first for word in ("docker", "kubepods", "containerd", "lxc")),
    }
    sign = next((sign for sign, there in signs.items() if there), None)
    where = f"seen by {sign}; its CPUs, memory and /dev/shm are set when it is started"
    yield Finding("container", "none seen") if sign is None else Finding("container", "yes", meaning=where)


def data_folder(path: Path, sources: Sources) -> Iterator[Finding]:
    """The file system that holds the data."""
    system, kind = file_system(path, sources.root)
    if system is None or kind is None:
        yield Finding("data", NOT_KNOWN, "note", "/proc/self/mountinfo does not show it")
        return
    where, level, meaning, do = _DISKS[kind]
    yield Finding("data", f"{system}, {where}", level, meaning, do)


_DISKS: dict[str, tuple[str, Level, str, str]] = {
    "memory": ("in memory", "ok", "", ""),
    "local": ("on a local disk", "ok", "", ""),
    "network": (
        "over a network",
        "warning",
        "each file needs a round trip, and others share the network",
        "Copy it to a local disk or memory (lightning-feed stage), or pack it (lightning-feed pack).",
    ),
    "rotational": (
        "on a disk that reports itself as rotating",
        "warning",
        "each small file in random order needs a seek of some milliseconds; virtual disks often only claim to rotate",
        "Pack it (lightning-feed pack), or stage it to an SSD or memory (lightning-feed stage).",
    ),
    "overlay": (
        "the container's own layers",
        "note",
        "opening files is slower here, and the disk below is unknown",
        "Mount the data as a volume.",
    ),
}
"""Kind of file system -> its place, and the finding."""


# --- GPUs ---------------------------------------------------------------------------------------------------------


def gpus(sources: Sources) -> Iterator[Finding]:
    """Driver and boards from NVML, with separate checks for each board's link and node."""
    nvml = sources.load("pynvml")
    nvml.nvmlInit()
    try:
        yield _driver(nvml, torch_cuda(sources))
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield Finding(f"GPU {index}", _name(nvml.nvmlDeviceGetName(handle)))
            for topic, check in ((f"PCIe link {index}", _link), (f"GPU {index} node", _node)):
                try:
                    yield check(topic, nvml, handle, sources)
                except (nvml.NVMLError, AttributeError) as error:  # not every board and driver has all values
                    yield Finding(topic, NOT_KNOWN, meaning=f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def torch_cuda(sources: Sources) -> tuple[int, int] | None:
    """The CUDA version that torch is built for, as (12, 6); None without CUDA."""
    try:
        built = sources.load("torch").version.cuda
    except ImportError:
        return None
    if built is None:
        return None
    major, minor = str(built).split(".")[:2]
    return int(major), int(minor)


def _driver(nvml: Any, wanted: tuple[int, int] | None) -> Finding:
    number = int(nvml.nvmlSystemGetCudaDriverVersion())  # 12040 is 12.4
    driver = (number // 1000, number % 1000 // 10)
    value = f"{_name(nvml.nvmlSystemGetDriverVersion())}, CUDA {driver[0]}.{driver[1]} at most"
    if wanted is None:
        return Finding("driver", value)
    built = f"CUDA {wanted[0]}.{wanted[1]}"
    # Within one major version of CUDA an older driver runs newer builds ("minor version compatibility").
    if driver[0] < wanted[0]:
        return Finding(
            "driver",
            value,
            "problem",
            f"too old for torch, which is built for {built}",
            f"Update the driver, or install a torch built for CUDA {driver[0]}.",
        )
    if driver < wanted:
        return Finding("driver", value, "note", f"torch is built for {built}, which is newer but still runs")
    return Finding("driver", value, meaning=f"torch is built for {built}")


def _link(topic: str, nvml: Any, handle: Any, _: Sources) -> Finding:
    width = int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    widest = int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    now = int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
    most = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    value = f"x{width} of x{widest}, generation {now} of {most}"
    if width < widest:
        meaning = f"copies to the GPU run at {100 * width / widest:.0f} % of the link's width"
        do = "Check again while it trains; if it stays, reseat the board or use another slot or riser."
        return Finding(topic, value, "warning", meaning, do)
    # An idle GPU lowers the generation by itself.
    meaning = "the link is below its best generation"
    do = "Check the slot's generation in the firmware (BIOS), and the riser."
    busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) >= BUSY_PCT
    return Finding(topic, value, "warning", meaning, do).only_if(now < most and busy)


def _node(topic: str, nvml: Any, handle: Any, sources: Sources) -> Finding:
    domain, _, rest = _name(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    place = sources.root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"  # NVML writes eight digits, sysfs four
    node = read_text(place / "numa_node")
    near = _cpu_set(read_text(place / "local_cpulist"))
    if not node or node == "-1" or not near or not hasattr(os, "sched_getaffinity"):
        return Finding(topic, NOT_KNOWN, meaning="the system does not show which CPUs are near")
    ours = os.sched_getaffinity(0) & near
    if ours:
        return Finding(topic, f"NUMA node {node}", meaning=f"{len(ours)} of our CPUs are near it")
    return Finding(
        topic,
        f"NUMA node {node}",
        "warning",
        "all our CPUs belong to another node: each copy crosses between sockets",
        f"numactl --cpunodebind={node} --membind={node} python ...",
    )


def pinned_memory(sources: Sources) -> Iterator[Finding]:
    """The limit on locked memory, and a test of pinning."""
    soft, _ = sources.limit("MEMLOCK")
    value = "no limit" if soft == UNLIMITED else f"limit {size_text(soft)}"
    torch = sources.load("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old driver is reported above, in our words
        there = torch.cuda.is_available()
    if not there:
        yield Finding("pinned memory", value, meaning="not tried: torch sees no CUDA device")
        return
    try:
        torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        yield Finding(
            "pinned memory",
            value,
            "problem",
            f"1 MiB could not be pinned: {str(error).strip().partition(chr(10))[0]}",
            "Raise the limit (ulimit -l unlimited), or train with pin_memory=False.",
        )
        return
    yield Finding("pinned memory", f"works, {value}")


def _cpu_set(text: str) -> set[int]:
    """CPU numbers from text such as ``"0-3,8"``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}


def _name(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


# --- threads ------------------------------------------------------------------------------------------------------


def threads(sources: Sources) -> Iterator[Finding]:
    """Thread-count variables and torch's threads, compared with the usable CPUs, and what other programs take."""
    usable = read_machine(sources.root).usable_cpus
    given = {name: sources.environ[name] for name in THREAD_VARIABLES if sources.environ.get(name)}
    taken_pct = others_pct_now(usable, sources.root, sources.wait)
    yield from _thread_variables(given, usable, spare=usable > 1 and (taken_pct or 0.0) < OTHERS_PCT)
    count = int(sources.load("torch").get_num_threads())
    yield Finding(
        "torch threads",
        str(count),
        "warning",
        f"more than the {usable} usable CPUs: torch counts the machine's CPUs, not the quota",
        f"OMP_NUM_THREADS={usable}, or torch.set_num_threads({usable}).",
    ).only_if(count > usable)
    if taken_pct is not None:
        free = max(1, int(usable * (1 - taken_pct / 100)))
        fewer = f"To train on the CPU beside them: OMP_NUM_THREADS={free}. " if count > free else ""
        meaning = "they slow training and loading down, most of all torch's threads, which wait for each other"
        yield Finding(
            "other programs",
            f"{taken_pct:.0f} % of the CPUs",
            "warning",
            meaning,
            f"{fewer}Measure again without them before you trust a figure.",
        ).only_if(taken_pct >= OTHERS_PCT)


def _thread_variables(given: dict[str, str], usable: int, *, spare: bool) -> Iterator[Finding]:
    topic = "thread variables"
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    counts = {name: _thread_count(name, value) for name, value in given.items()}
    invalid = ", ".join(f"{name}={given[name]}" for name, count in counts.items() if count is None)
    most = max((count for count in counts.values() if count is not None), default=0)
    if invalid:
        meaning = f"{invalid}: not a number of threads; programs ignore it, or stop at it"
        yield Finding(topic, shown, "warning", meaning, f"Set a whole number from 1 to {usable}, or leave it out.")
    if most > usable:
        meaning = f"more threads than the {usable} usable CPUs: they take turns and slow each other"
        yield Finding(topic, shown, "warning", meaning, f"Set them to {usable} or less, or leave them out.")
    elif not invalid:
        yield Finding(
            topic,
            shown,
            "note",
            "right for workers; in the main process CPU operations use one thread (torchrun sets it)",
            "Leave it out if the model trains on the CPU.",
        ).only_if(1 in counts.values() and spare)


def _thread_count(name: str, value: str) -> int | None:
    """Threads that a variable sets; None if it is not a number. In a list (only OMP_NUM_THREADS), the first counts."""
    parts = [part.strip() for part in (value.split(",") if name == "OMP_NUM_THREADS" else [value])]
    return int(parts[0]) if all(part.isdecimal() and int(part) > 0 for part in parts) else None


# --- decoders -----------------------------------------------------------------------------------------------------


def pillow(sources: Sources) -> Iterator[Finding]:
    """The installed Pillow, and its JPEG library."""
    simd = sources.version("Pillow-SIMD")
    name = f"Pillow {sources.load('PIL').__version__}" if simd is None else f"Pillow-SIMD {simd}"
    if sources.load("PIL.features").check_feature("libjpeg_turbo"):
        yield Finding("Pillow", f"{name}, libjpeg-turbo")
        return
    yield Finding(
        "Pillow",
        f"{name}, without libjpeg-turbo",
        "warning",
        "JPEGs decode more slowly than they could",
        "Install Pillow's own wheel, or use another decoder: pip install 'lightning-feed[images]'",
    )


def decoders(sources: Sources) -> Iterator[Finding]:
    """Other decoders that could be chosen, and the threads of OpenCV."""
    there = [name for name, packages in DECODERS.items() if any(sources.version(one) for one in packages)]
    missing = ", ".join(name for name in DECODERS if name not in there)
    meaning = f"not installed: {missing}; a faster one may be among them"
    yield Finding(
        "decoders", ", ".join([*there, "pillow"]), "note", meaning, "pip install 'lightning-feed[images]'"
    ).only_if(bool(missing))
    if "opencv" in there:
        count = int(sources.load("cv2").getNumThreads())
        usable = read_machine(sources.root).usable_cpus
        meaning = f"in every worker, on {usable} usable CPUs; our loaders set a suitable number"
        yield Finding(
            "OpenCV threads", str(count), "note", meaning, "In workers of your own: cv2.setNumThreads(0)"
        ).only_if(count > 1)


def _installed_dali(sources: Sources) -> dict[int, Version]:
    """Versions of the installed DALI builds, by CUDA version."""
    versions = {cuda: sources.version(package) for cuda, package in DALI_PACKAGES.items()}
    return {cuda: Version(version) for cuda, version in versions.items() if version is not None}


def dali(sources: Sources) -> Iterator[Finding]:
    """The installed DALI, compared with torch's CUDA. DALI is not imported."""
    installed = _installed_dali(sources)
    ours, _ = torch_cuda(sources) or (None, None)
    package = DALI_PACKAGES[12 if ours is not None and ours < 13 else 13]
    value = ", ".join(f"{version} for CUDA {cuda}" for cuda, version in installed.items())
    if not installed:
        meaning = 'backend="dali-gpu" and "dali-cpu" need it; lightning-feed diagnose shows if decoding limits'
        missing = Finding("DALI", "not installed", meaning=meaning)
        if ours is not None and sources.load("torch").cuda.is_available():
            missing = dataclasses.replace(missing, level="note", do=f"pip install {package}")
        yield missing
    elif list(installed) != [ours or next(iter(installed))]:
        meaning = "dali-gpu needs exactly one DALI build installed, the one for torch's CUDA version"
        others = " ".join(DALI_PACKAGES[cuda] for cuda in installed)
        again = f"pip uninstall --yes {others} && pip install {package}"
        yield Finding("DALI", value, "warning", meaning, again if ours in DALI_PACKAGES else "")
    else:
        meaning = f"older than {OLDEST_DALI}.0, the oldest supported version"
        old = min(installed.values()).major < OLDEST_DALI
        yield Finding("DALI", value, "warning", meaning, f"pip install --upgrade {package}").only_if(old)


def nvjpeg(sources: Sources) -> Iterator[Finding]:
    """torchvision's nvJPEG, judging by its build."""
    if sources.version("torchvision") is None:
        return  # reported with the versions
    ours = torch_cuda(sources)
    built = getattr(sources.load("torchvision.version"), "cuda", None)
    sources.load("torchvision.io")  # which registers the operators
    if built is not None and hasattr(sources.load("torch").ops.image, "decode_jpegs_cuda"):
        # No build reports this; torchvision's own builds for CUDA include nvJPEG.
        yield Finding("nvJPEG", "in torchvision", meaning='backend="nvjpeg" decodes on the GPU with it')
    elif ours is None:
        yield Finding("nvJPEG", "not in torchvision", meaning="this torch has no CUDA to decode on")
    else:
        yield Finding(
            "nvJPEG",
            "not in torchvision",
            "note",
            'this torchvision is built without CUDA, so backend="nvjpeg" cannot be used',
            f"pip install torchvision --index-url https://download.pytorch.org/whl/cu{ours[0]}{ours[1]}",
        )


# --- versions -----------------------------------------------------------------------------------------------------


def versions(sources: Sources) -> Iterator[Finding]:
    """Versions, compared with the oldest supported ones."""
    yield Finding("python", platform.python_version())
    needed = {canonicalize_name(one.name): one.specifier for one in map(Requirement, sources.requirements() or ())}
    lightnings = ("lightning", "pytorch_lightning")
    for name in ("torch", "torchvision", *lightnings):
        found = sources.version(name)
        wanted = needed.get(canonicalize_name(name), SpecifierSet())
        if found is not None:
            meaning = f"older than {str(wanted).removeprefix('>=')}, the oldest supported version"
            old = not wanted.contains(found, prereleases=True)
            yield Finding(name, found, "problem", meaning, f"pip install '{name}{wanted}'").only_if(old)
        elif name not in lightnings or not any(map(sources.version, lightnings)):  # one of the two is enough
            level: Level = "problem" if name == "torch" else "warning"
            yield Finding(name, "not installed", level, do=f"pip install '{name}{wanted}'")


# --- all of them --------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Sources], Iterator[Finding]]] = {
    "CPUs": cpus, "CPU clock": clock, "memory": memory, "/dev/shm": shared_memory, "open files": open_files,
    "container": container, "GPU": gpus, "pinned memory": pinned_memory, "threads": threads,
    "Pillow": pillow, "decoders": decoders, "DALI": dali, "nvJPEG": nvjpeg, "versions": versions,
}  # fmt: skip
"""Checks by topic. The topic is shown if the check fails."""


def examine(data: str | Path | None = None, sources: Sources | None = None) -> list[Finding]:
    """Check everything that matters for feeding a GPU. Takes about as long as ``import torch``, and half a second.

    A check that fails is a finding, too. The other checks still run.

    Args:
        data: a file or folder of the dataset, to check its file system.
        sources: sources of the findings; None: this machine.

    Raises:
        SettingsError: ``data`` does not exist.
    """
    checks = dict(CHECKS)
    if data is not None:
        if not Path(data).exists():
            raise SettingsError(f"--data {data}: there is no such file or folder. Give the folder with the samples.")
        checks["data"] = partial(data_folder, Path(data))
    sources = sources or Sources()
    return [one for topic, check in checks.items() for one in _findings(topic, check, sources)]


def _findings(topic: str, check: Callable[[Sources], Iterator[Finding]], sources: Sources) -> Iterator[Finding]:
    """The findings of a check. If it fails, the last one is its failure."""
    try:
        yield from check(sources)
    except Exception as error:  # noqa: BLE001  # any broken source is a finding of its own
        words = str(error).partition("\n")[0]
        yield Finding(topic, NOT_KNOWN, "note", f"{type(error).__name__}: {words}".rstrip(": "))
